"""The way in from other packages: what their modules take in place of their own attention, and their recurrent weights.

Each module is named after the package that it needs, and imports only where that is installed.
"""
