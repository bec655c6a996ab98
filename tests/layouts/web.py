"""Runs the page's scripts in node, without a browser: the web files of `layouts/web` in order, then expressions."""

from __future__ import annotations

import functools
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.patience import PATIENCE

ROOT = Path(__file__).parents[2]
WEB = ROOT / "layouts" / "web"
BASE_JS = str(ROOT / "cuteflash" / "web" / "base.js")  # what core.js adds to

# The files share one scope, as in the page's one inline script.
RUNNER = """
"use strict";
const fs = require("fs");
const vm = require("vm");
const { files, prelude, expression, data } = JSON.parse(fs.readFileSync(0, "utf8"));
const source = files.map((file) => fs.readFileSync(file, "utf8"));
const body = ['"use strict";', prelude, ...source, `return (${expression});`].join("\\n");
const run = vm.compileFunction(body, ["data"], { filename: "page.js" });
process.stdout.write(JSON.stringify(run(data) ?? null));
"""


@functools.cache
def node() -> str:
    """Path of node; skips the test where there is none."""
    found = shutil.which("node")
    if found is None:
        pytest.skip("node is not installed: the page's scripts cannot run here")
    return found


def run_js(files: Sequence[str], expression: str, data: object = None, prelude: str | None = None) -> Any:
    """The JSON value of `expression` after the web files `files` ran in order, `data` being in scope.

    A file may also be a path. `prelude` runs first; by default it makes the namespace that core.js would make, unless
    core.js is among the files.
    A script that throws raises AssertionError with node's message.
    """
    if prelude is None:
        prelude = "" if "core.js" in files else "const CF = { views: {} };"
    job = {"files": [str(WEB / name) for name in files], "prelude": prelude, "expression": expression, "data": data}
    done = subprocess.run(
        [node(), "-e", RUNNER],
        input=json.dumps(job),
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        env={**os.environ, "NODE_NO_WARNINGS": "1"},
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
