"""What --help shows, and the list of commands."""

from __future__ import annotations

import re

import pytest
import yaml

from ctl_core.__main__ import main
from ctl_core.options import COMMANDS, OPTIONS
from ctl_core.settings import SETTINGS, Config

pytestmark = pytest.mark.usefixtures("folder")


def help_of(command: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main([command, "--help"]) == 0
    return " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize("command", OPTIONS)
def test_help_shows_every_setting_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = help_of(command, capsys)
    sections = re.split(
        r" (?=--[a-z-]+(?: [A-Z{]|(?: \[[a-z]+\])?, --no-))", text.split(" options: ")[1]
    )
    by_flag = {section.split()[0].rstrip(","): section for section in sections}
    for name, setting in SETTINGS.items():
        section = by_flag["--" + name.replace("_", "-")]
        default = yaml.safe_load(section.split("(default: ")[-1].removesuffix(")"))
        assert default == getattr(Config(), name), section
        assert str(setting.description) in section and len(section) > 50, "says what it is for"
    for option in OPTIONS[command]:
        assert f"--{option}" in by_flag
    assert "CTL_BATCH_SIZE" in text


def test_help_and_the_list_of_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == main(["-h"]) == 0
    assert main([]) == 2
    shown = capsys.readouterr().out
    for command, text in COMMANDS.items():
        assert len(re.findall(rf"^  {command} +{re.escape(text)}$", shown, re.MULTILINE)) == 3
    assert main(["hooks", "--help"]) == 0
