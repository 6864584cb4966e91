"""Loading one model's weights into another that is wrapped differently."""

from __future__ import annotations

from phalanx.dist.wrappers import unwrap

__all__ = ["unwrap"]
