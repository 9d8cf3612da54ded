"""The site of the documentation: its navigation, its reference, Sphinx's configuration and the check of what was built."""
