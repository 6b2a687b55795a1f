"""A run can be mirrored to a bucket, here on moto's S3 server (``make test-s3``).

tests/engine/test_mirror.py tests everything that does not depend on the kind of storage.
"""

import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import numpy as np
import pytest
from moto.server import ThreadedMotoServer

from ctl_core.checkpoint.mirror import STAGING
from ctl_core.checkpoint.record import list_saved_steps
from tests.golden import engine
from tests.golden.compare import read_checkpoint
from tests.helpers.pausing import PAUSING
from tests.helpers.waiting import wait_until_or_ended

STEPS = 40
FLAGS = ["train", "--run-name=a", "--batch-size=16", "--ckpt-every=5", f"--steps={STEPS}"]
FLAGS += ["--deterministic", "--eval-every=0"]
PAUSE = "--hparams.pause=0.05"
KEYS = {"AWS_ACCESS_KEY_ID": "key", "AWS_SECRET_ACCESS_KEY": "secret", "AWS_REGION": "us-east-1"}


class Bucket:
    """A bucket on a local server, and a project that trains with it."""

    def __init__(self, endpoint: str, folder: Path) -> None:
        self.folder = folder
        self._endpoint = endpoint
        self._client: Any = boto3.client(
            "s3",
            endpoint_url=endpoint,
            region_name="us-east-1",
            aws_access_key_id="key",
            aws_secret_access_key="secret",
        )
        self._client.create_bucket(Bucket="bucket")

    def list_names(self) -> set[str]:
        """Returns the keys of all objects."""
        pages = self._client.list_objects_v2(Bucket="bucket")
        return {entry["Key"] for entry in pages.get("Contents", [])}

    def list_buckets(self) -> list[str]:
        return [entry["Name"] for entry in self._client.list_buckets()["Buckets"]]

    def allow(self, requests: int) -> None:
        """Denies access with the keys of the tests after this number of requests."""
        request = urllib.request.Request(
            f"{self._endpoint}/moto-api/reset-auth",
            data=str(requests).encode(),
            headers={"Content-Type": "text/plain"},
        )
        urllib.request.urlopen(request).close()

    def start(self, *flags: str) -> subprocess.Popen[bytes]:
        environ = engine.environment(AWS_ENDPOINT_URL=self._endpoint, **KEYS)
        command = engine.command_line(*FLAGS, *flags)
        with (self.folder / "log").open("ab") as log:
            return subprocess.Popen(command, cwd=self.folder, env=environ, stdout=log, stderr=log)

    def train(self, *flags: str) -> tuple[int, str]:
        """Trains, and returns the exit code and the output."""
        (self.folder / "log").unlink(missing_ok=True)
        code = self.start(*flags).wait(600)
        return code, (self.folder / "log").read_text()


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    """Returns the address of an S3 server."""
    server = ThreadedMotoServer("127.0.0.1", port=0)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture
def bucket(endpoint: str, tmp_path: Path) -> Iterator[Bucket]:
    """Returns an empty bucket with a project."""
    (tmp_path / "callbacks.py").write_text(PAUSING)
    yield Bucket(endpoint, tmp_path)
    urllib.request.urlopen(f"{endpoint}/moto-api/reset", data=b"").close()


def test_machine_is_lost_again_and_again(bucket: Bucket) -> None:
    """A run whose machine is lost while it copies or fetches files ends with the same weights."""
    runs = bucket.folder / "runs"
    code, log = bucket.train()
    assert code == 0, log
    runs.rename(bucket.folder / "whole")
    flags = ["--mirror=s3://bucket/my", PAUSE]

    def list_begun() -> list[int]:
        """Returns the steps whose files are in the bucket, perhaps without their records."""
        matches = (re.fullmatch(r"my/a/ckpt/ckpt-(\d+)\.index", n) for n in bucket.list_names())
        return [int(match[1]) for match in matches if match]

    for step in (10, 20):
        process = bucket.start(*flags)
        wait_until_or_ended(lambda: max(list_begun(), default=0) >= step, process)  # noqa: B023
        process.kill()
        process.wait()
        shutil.rmtree(runs)
        process = bucket.start(*flags)
        wait_until_or_ended((runs / "a" / STAGING).exists, process)
        process.kill()
        process.wait()
    code, log = bucket.train(*flags)
    assert code == 0, log
    assert "resuming at step" in log, log
    for part in ("", "engine"):
        expected = read_checkpoint(bucket.folder / "whole/a", STEPS, part)
        actual = read_checkpoint(runs / "a", STEPS, part)
        assert expected.keys() == actual.keys()
        for name, value in expected.items():
            if "ITERATOR" not in name:
                np.testing.assert_array_equal(actual[name], value, err_msg=name)
    lines = (runs / "a/metrics.jsonl").read_text()
    assert lines == (bucket.folder / "whole/a/metrics.jsonl").read_text()
    records = {name for name in bucket.list_names() if name.endswith(".json")}
    assert records == {f"my/a/ckpt/engine/ckpt-{step}.json" for step in (30, 35, 40)}


def test_rights_that_are_withdrawn_end_no_training(bucket: Bucket) -> None:
    """A run on this machine continues, and one that is only in the bucket is refused.

    It is fetched once access is allowed again.
    """
    code, log = bucket.train("--mirror=s3://bucket/my", "--steps=10")
    assert (code, log.count("warning")) == (0, 0), log
    bucket.allow(0)
    code, log = bucket.train("--mirror=s3://bucket/my", "--steps=20")
    assert code == 0, log
    warnings = [line for line in log.splitlines() if line.startswith("warning: mirror: ")]
    assert len(warnings) == 3, log
    assert "s3://bucket/my/a cannot be fetched: PermissionError" in warnings[0]
    assert "step 10 could not be copied to s3://bucket/my/a (PermissionError" in warnings[1]
    assert warnings[2].endswith("that could not be copied to s3://bucket/my/a: 3.")
    (bucket.folder / "runs").rename(bucket.folder / "kept")
    code, log = bucket.train("--mirror=s3://bucket/my", "--steps=20")
    assert code == 2, log
    assert "cannot be fetched: PermissionError" in log, log
    bucket.allow(sys.maxsize)
    code, log = bucket.train("--mirror=s3://bucket/my", "--steps=15")
    assert code == 0, log
    assert "resuming at step 10" in log, log


def test_bucket_that_is_missing_is_not_made(bucket: Bucket) -> None:
    code, log = bucket.train("--mirror=s3://buket/my", "--steps=10")
    assert code == 0, log
    assert log.count("could not be copied to s3://buket/my/a (") == 1, log
    assert bucket.list_buckets() == ["bucket"]
    assert list_saved_steps(bucket.folder / "runs/a/ckpt") == [10, 5]
