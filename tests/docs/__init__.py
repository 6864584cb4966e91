"""Tests of the manual: what it shows runs."""
