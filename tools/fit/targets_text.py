"""The word that names what is fitted, checked before a process is started for it."""

from __future__ import annotations

import os

from phalanx.tools.usage import UsageMistake


def split_target(text: str) -> tuple[str, str]:
    """``("train.py", "make")`` for a script, ``("", "resnet50")`` for a model of torchvision.

    >>> split_target("resnet50"), split_target("a/train.py:make")
    (('', 'resnet50'), ('a/train.py', 'make'))

    Raises:
        UsageMistake: It is neither.
    """
    if not text.strip():
        raise UsageMistake("MODEL is empty.", fix="phalanx fit resnet50, or phalanx fit train.py:make")
    path, colon, function = text.rpartition(":")
    if not colon:
        if text.endswith(".py"):
            raise UsageMistake(
                f"{text}: which of its functions?",
                fix=f"{text}:FUNCTION, a function that returns (model, example batch, loss)",
            )
        return "", text
    if not path.endswith(".py"):
        raise UsageMistake(
            f"{text}: neither a model's name nor script.py:function.", fix="phalanx fit train.py:make"
        )
    if not function.isidentifier():
        raise UsageMistake(f"{text}: {function!r} is no name of a function.", fix=f"{path}:FUNCTION")
    if not os.path.isfile(path):
        raise UsageMistake(f"{path}: no such file.", fix="the path of a Python script, then :FUNCTION")
    return path, function
