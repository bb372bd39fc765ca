"""Asks pip whether every extra resolves, from wheels alone, on each Python that pyproject.toml names. Installs nothing.

pip chooses wheels for the Python of `--python-version`, but evaluates markers for the Python it runs on. So it is run
with the markers' environment of the Python asked for, and says so itself if a newer pip takes that from elsewhere.

One question for all extras together: what satisfies them all satisfies each. Exit code 1 if a named Python has no
answer. The first Python that is not named is asked about too, and a line tells when it could be named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
import tomllib
import venv
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PIP = "pip>=26,<27"  # it need not download a wheel to read its metadata, nor keep it after
AS_ANOTHER_PYTHON = """
import runpy, sys
from pip._vendor.packaging import markers
version, own = sys.argv.pop(1), markers.default_environment
markers.default_environment = lambda: own() | {"python_version": version, "python_full_version": f"{version}.0"}
if not markers.Marker(f"python_version == '{version}'").evaluate():
    sys.exit("this pip takes the environment of its markers from elsewhere")
runpy.run_module("pip", run_name="__main__", alter_sys=True)
"""


@dataclass(frozen=True, slots=True)
class Answer:
    version: str
    seconds: float
    packages: dict[str, str]  # version by name; empty: nothing fits
    said: str


def named(classifiers: list[str]) -> list[str]:
    """Versions as `3.12`, oldest first."""
    minors = [c.partition(" :: Python :: 3.")[2] for c in classifiers]
    return [f"3.{minor}" for minor in sorted(int(m) for m in minors if m)]


def ask(python: Path, version: str, extras: list[str], folder: Path) -> Answer:
    report = folder / f"{version}.json"
    words = ["install", "-qq", "--dry-run", "--ignore-installed", "--use-feature=fast-deps", "--only-binary=:all:"]
    words += ["--python-version", version, "--target", str(folder / version), "--report", str(report)]
    began = time.monotonic()
    done = subprocess.run(
        [python, "-c", AS_ANOTHER_PYTHON, version, *words, f".[{','.join(extras)}]"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    found = json.loads(report.read_text())["install"] if done.returncode == 0 else []
    packages = {p["metadata"]["name"]: p["metadata"]["version"] for p in found}
    return Answer(version, time.monotonic() - began, packages, (done.stdout + done.stderr).strip())


def main() -> int:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = sorted(project["optional-dependencies"])
    versions = named(project["classifiers"])
    following = f"3.{int(versions[-1].partition('.')[2]) + 1}"
    with tempfile.TemporaryDirectory(prefix="pdq-resolve-") as name:
        folder = Path(name)
        venv.create(folder / "pip", with_pip=True)
        python = folder / "pip" / "bin" / "python"
        subprocess.run([python, "-m", "pip", "install", "-q", PIP], check=True)
        with ThreadPoolExecutor(4) as pool:
            answers = list(pool.map(lambda v: ask(python, v, extras, folder), [*versions, following]))
    for answer in answers:
        chosen = f"{len(answer.packages)} packages, torch {answer.packages.get('torch')}"
        print(f"Python {answer.version}: {chosen if answer.packages else 'no answer'} ({answer.seconds:.0f} s)")
        if not answer.packages:
            print("  " + answer.said.replace("\n", "\n  "))
    *asked, beyond = answers
    if beyond.packages:
        print(f"note: all extras resolve on Python {beyond.version} too; README and pyproject.toml could name it")
    return 0 if all(a.packages for a in asked) else 1


if __name__ == "__main__":
    sys.exit(main())
