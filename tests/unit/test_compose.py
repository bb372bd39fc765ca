"""compose.yaml: what every deployment of it must have. The services themselves are run in pipeline/test_compose.py."""

import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import yaml

from pdq.config import DecodeSettings, GatewaySettings, PrefillSettings, Settings, env_name, known_variables

ROOT = Path(__file__).parents[2]
OURS: dict[str, type[Settings]] = {"gateway": GatewaySettings, "prefill": PrefillSettings, "decode": DecodeSettings}


@pytest.fixture(scope="module")
def compose() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((ROOT / "compose.yaml").read_text())
    return found


def test_the_services_are_those_of_the_design(compose: dict[str, Any]) -> None:
    assert sorted(compose["services"]) == ["decode", "gateway", "prefill", "valkey"]


@pytest.mark.parametrize(("name", "cls"), OURS.items())
def test_every_setting_of_a_program_can_be_given_by_its_variable(
    name: str, cls: type[Settings], compose: dict[str, Any]
) -> None:
    passed = set(compose["services"][name]["environment"])
    wanted = {env_name(f.name) for f in fields(cls)} - {"PDQ_NAME"}  # a fixed name cannot be scaled
    assert passed == wanted | {"PDQ_LOG_LEVEL"}


@pytest.mark.parametrize("name", OURS)
def test_the_environment_holds_no_unknown_variable(name: str, compose: dict[str, Any]) -> None:
    assert set(compose["services"][name]["environment"]) <= known_variables()


@pytest.mark.parametrize("name", OURS)
def test_all_programs_share_one_redis_and_wait_until_it_is_healthy(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert service["environment"]["PDQ_REDIS_URL"] == "redis://valkey:6379/0"
    assert service["depends_on"] == {"valkey": {"condition": "service_healthy"}}


@pytest.mark.parametrize("name", ["prefill", "decode"])
def test_workers_can_be_scaled(name: str, compose: dict[str, Any]) -> None:
    service = compose["services"][name]
    assert not {"container_name", "hostname", "ports"} & set(service)
    assert "PDQ_NAME" not in service["environment"]


def test_commands_are_the_programs_themselves_so_that_signals_reach_them(compose: dict[str, Any]) -> None:
    assert {name: compose["services"][name]["command"] for name in OURS} == {
        "gateway": ["pdq", "gateway"],
        "prefill": ["pdq", "worker", "prefill"],
        "decode": ["pdq", "worker", "decode"],
    }
    assert all(compose["services"][name]["init"] is True for name in OURS)


def test_every_service_has_a_real_health_check(compose: dict[str, Any]) -> None:
    for name in OURS:
        assert compose["services"][name]["healthcheck"]["test"] == ["CMD", "pdq", "health", name]
    assert compose["services"]["valkey"]["healthcheck"]["test"] == ["CMD-SHELL", "valkey-cli ping | grep -q PONG"]


@pytest.mark.parametrize("name", OURS)
def test_a_program_has_longer_than_its_drain_before_it_is_killed(name: str, compose: dict[str, Any]) -> None:
    default = re.fullmatch(r"\$\{STOP_GRACE_PERIOD:-(\d+)s\}", compose["services"][name]["stop_grace_period"])
    assert default is not None
    # A gateway's drain, plus a worker's: what the gateway still answers, the workers still compute.
    assert int(default[1]) >= OURS[name]().drain_seconds + 10  # type: ignore[attr-defined]


def test_the_gateway_is_reachable_from_this_machine_only(compose: dict[str, Any]) -> None:
    service = compose["services"]["gateway"]
    assert service["environment"]["PDQ_HOST"] == "0.0.0.0"
    assert service["ports"] == ["127.0.0.1:${PORT:-8000}:" + service["environment"]["PDQ_PORT"]]


def test_valkey_keeps_the_queue_and_evicts_only_what_has_a_ttl(compose: dict[str, Any]) -> None:
    service = compose["services"]["valkey"]
    options = dict(zip(service["command"][1::2], service["command"][2::2], strict=True))
    assert service["command"][0] == "valkey-server"
    assert options["--maxmemory-policy"] == "volatile-lru"
    assert (options["--appendonly"], options["--appendfsync"]) == ("yes", "everysec")
    assert options["--maxmemory"] == "${VALKEY_MEMORY:-4gb}"
    assert service["volumes"] == ["valkey:/data"]
    assert "valkey" in compose["volumes"]
    assert "ports" not in service


def test_one_image_without_root_is_built_from_the_file_itself(compose: dict[str, Any]) -> None:
    builds = [compose["services"][name]["build"] for name in OURS]
    assert builds[0] == builds[1] == builds[2]
    assert len({compose["services"][name]["image"] for name in OURS}) == 1
    lines = builds[0]["dockerfile_inline"].split("\n")
    assert lines[0] == "FROM python:3.12-slim"
    assert lines.index("USER pdq") > next(i for i, line in enumerate(lines) if line.startswith("RUN pip install"))
    assert "EXTRA_INDEX_URL" in builds[0]["args"]


def test_the_image_gets_every_file_that_the_package_is_built_from(compose: dict[str, Any]) -> None:
    dockerfile = compose["services"]["gateway"]["build"]["dockerfile_inline"]
    copied = [word for line in dockerfile.split("\n") if line.startswith("COPY ") for word in line.split()[1:-1]]
    assert sorted(copied) == ["LICENSE", "README.md", "pdq", "pyproject.toml", "workers"]


def test_dollars_in_the_dockerfile_are_left_to_the_shell(compose: dict[str, Any]) -> None:
    dockerfile = compose["services"]["gateway"]["build"]["dockerfile_inline"]
    assert not re.findall(r"(?<!\$)\$(?!\$)", dockerfile.replace("$$", ""))


def test_models_are_kept_in_a_volume_that_the_user_may_write(compose: dict[str, Any]) -> None:
    for name in OURS:
        assert compose["services"][name]["volumes"] == ["models:/cache"]
    assert "models" in compose["volumes"]
    dockerfile = compose["services"]["gateway"]["build"]["dockerfile_inline"]
    assert "install --directory --owner pdq /cache" in dockerfile
    assert "PDQ_CACHE=/cache/pdq" in dockerfile
