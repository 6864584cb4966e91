"""Reports as text and as Markdown."""

from __future__ import annotations

import re

import pytest

from phalanx.tools.doctor.checks import diagnose
from phalanx.tools.doctor.facts import DriverFacts, Facts, GpuFacts, LibraryFacts, NetworkFacts, TorchFacts
from phalanx.tools.doctor.findings import Finding, Report
from phalanx.tools.doctor.masking import Masks
from phalanx.tools.doctor.render import render_markdown, render_text

_FACTS = Facts(
    torch=TorchFacts(
        installed=True,
        version="2.4.0+cu121",
        cuda="12.1",
        cuda_available=False,
        cudnn="9.1.0",
        cudnn_loaded="8.9.2",
    ),
    driver=DriverFacts(version="470.57.02"),
    gpus=(GpuFacts(index=0, name="NVIDIA A40", uuid="GPU-12345678-aaaa-bbbb-cccc-1234567890ab"),) * 2,
    libraries=(LibraryFacts(name="libcudnn.so.8", path="/home/ada/lib/libcudnn.so.8"),),
    env={"LD_LIBRARY_PATH": "/home/ada/lib", "USER": "ada"},
    network=NetworkFacts(
        host_name="secretbox.lab.example", host_error="secretbox.lab.example does not resolve"
    ),
    messages=("ada@secretbox: serial number: 1234567890 at 10.20.30.40",),
)


def test_text_leads_with_the_root_cause_and_keeps_commands_whole() -> None:
    text = render_text(diagnose(_FACTS), width=60)
    assert text.index("[ld-library-path-shadows-cudnn]") < text.index("[hostname-unresolvable]")
    assert "start here" in text
    assert "2 x NVIDIA A40" in text
    for finding in diagnose(_FACTS).findings:
        assert all(line in text for line in finding.fix)
    wrapped = [
        line
        for line in text.split("\n")
        if not any(fix in line for finding in diagnose(_FACTS).findings for fix in finding.fix)
    ]
    assert max(map(len, wrapped)) <= 60


@pytest.mark.parametrize("colour", [True, False])
def test_colours_only_where_wanted(colour: bool) -> None:
    assert ("\x1b[" in render_text(diagnose(_FACTS), colour=colour)) == colour


def test_what_a_report_lacked_is_shown() -> None:
    text = render_text(diagnose(Facts()), found=("GPUs",), lacked=("torch version", "packages"))
    assert "Not in the report: torch version, packages" in text
    assert "Nothing wrong found" in text


def test_markdown_names_no_user_host_or_address() -> None:
    report = diagnose(_FACTS)
    leaky = Report(
        _FACTS, (*report.findings, Finding("x", "warn", "t", _FACTS.messages, ("ssh ada@secretbox",)))
    )
    text = render_markdown(leaky)
    for name in ("ada", "secretbox", "10.20.30.40", "1234567890", "lab.example"):
        assert not re.search(rf"(?<![a-z]){re.escape(name)}(?![a-z])", text), name
    assert "driver 470.57.02" in text
    assert "```sh\nunset LD_LIBRARY_PATH" in text


@pytest.mark.parametrize(
    ("line", "masked"),
    [
        ("C:\\Users\\Ada\\venv", "C:\\Users\\<user>\\venv"),
        ("GPU-12345678-aaaa-bbbb-cccc-1234567890ab", "GPU-<uuid>"),
        ("HF_TOKEN=hf_abcdef", "HF_TOKEN=<hidden>"),
        (
            "/usr/local/cuda-12.1/targets/lib/libcublas.so.12",
            "/usr/local/cuda-12.1/targets/lib/libcublas.so.12",
        ),
        ("/projects/secret/team/models/run7", "<path>/run7"),
        ("fe80::1ff:fe23:4567:890a", "<address>"),
        ("driver 535.104.05, torch 2.6.0+cu126", "driver 535.104.05, torch 2.6.0+cu126"),
        ("https://download.pytorch.org/whl/cu126", "https://download.pytorch.org/whl/cu126"),
    ],
)
def test_masks(line: str, masked: str) -> None:
    assert Masks(Facts()).apply(line) == masked


def test_json_has_the_promised_names() -> None:
    data = diagnose(_FACTS).to_json()
    assert data["schema"] == 1
    assert data["verdict"] == "fail"
    assert set(data["findings"][0]) == {"id", "status", "title", "evidence", "fix"}
    assert data["facts"]["torch"]["version"] == "2.4.0+cu121"
