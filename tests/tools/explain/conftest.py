"""`phalanx run` for the tests that explain its failures."""

from tests.launch.conftest import launcher

__all__ = ["launcher"]
