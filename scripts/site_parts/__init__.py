"""The site of the documentation: its navigation, the configuration of Sphinx, and a check of what was built."""
