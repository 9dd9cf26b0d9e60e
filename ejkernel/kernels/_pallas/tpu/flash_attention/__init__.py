"""Flash attention for TPUs."""
