"""Metadata is in setup.cfg; this file lets tools that call setup.py find it."""

from setuptools import setup

setup()
