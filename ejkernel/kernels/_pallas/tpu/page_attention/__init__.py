"""Paged attention for TPUs: forward alone, with residuals that any implementation's backward takes."""
