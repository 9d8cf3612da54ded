"""For tools that still look for this file. Everything is declared in pyproject.toml."""

from setuptools import setup

setup()
