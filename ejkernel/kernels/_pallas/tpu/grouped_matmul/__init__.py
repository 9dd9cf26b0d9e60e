"""Grouped matrix products on TPUs."""
