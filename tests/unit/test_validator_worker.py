"""Worker processes behind a real Redis: killed in mid-job, cut off from Redis, given rubbish, reached over TLS."""

import asyncio
import datetime
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from redis import Redis

from deployments.chain.faults import FaultPolicy
from deployments.config.errors import ConfigError
from deployments.evidence.validators.redis_client import FIELD, GROUP, connect, shown
from deployments.evidence.validators.redis_stream import RedisStream
from deployments.evidence.validators.registry import Registry
from deployments.evidence.validators.validation import Validation
from scripts.validator_worker_lib import cli
from tests.unit import redis_server

TIMES = {"validator_limit_s": 1.0, "validator_reclaim_s": 1.0, "circuit_pause_s": 0.1, "circuit_pause_max_s": 0.2}
FAULTS = replace(FaultPolicy(), **TIMES)
PATIENCE_S = 30.0
MARKED = "tests.unit.validator_functions:marked_slow"


def write_config(folder: Path, **redis: Any) -> Path:
    configured = {"slow": {"kind": "custom", "function": MARKED, "parameters": {"file": str(folder / "marks")}}}
    evidence = {"pool": "cpu", "validators": {"configured": configured, "redis": redis}}
    application = {"import_path": "deployments.app:build", "args": {"evidence": evidence, "faults": TIMES}}
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": [application]}))
    return path


@contextmanager
def worker(config: Path, url: str) -> Iterator["subprocess.Popen[bytes]"]:
    process = subprocess.Popen(
        [sys.executable, "-m", "scripts.validator_worker_lib.cli", str(config)],
        env={**os.environ, "TEST_VALIDATORS_AT": url},
        stderr=(config.parent / f"log-{time.monotonic_ns()}").open("wb"),
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


async def until(true: Callable[[], bool]) -> None:
    ends = time.monotonic() + PATIENCE_S
    while not true():
        assert time.monotonic() < ends
        await asyncio.sleep(0.02)


def asker(url: str, config: Path) -> Validation:
    settings, faults = cli.load(config)
    assert settings.redis is not None
    registry = Registry(settings.configured)
    return Validation(registry, RedisStream(url, faults, stream=settings.redis.stream), faults)


@pytest.fixture
def redis() -> Iterator[tuple[str, Any]]:
    try:
        with redis_server.running() as (url, _):
            yield url, Redis.from_url(url)
    except RuntimeError as error:
        pytest.skip(str(error))


def consumers(client: Any) -> int:
    return len(client.xinfo_consumers("v", GROUP)) if client.exists("v") else 0


async def test_a_killed_workers_job_is_finished_by_another(redis: tuple[str, Any], tmp_path: Path) -> None:
    url, client = redis
    config, marks = write_config(tmp_path, url_env="TEST_VALIDATORS_AT", stream="v"), tmp_path / "marks"
    front = asker(url, config)
    with worker(config, url) as first:
        asking = asyncio.create_task(front.validate(["text"], [{"name": "slow"}], PATIENCE_S, {"tenant": "t"}))
        await until(marks.exists)  # its validator has begun
        child = int(marks.read_text())
        first.send_signal(signal.SIGKILL)
        with worker(config, url) as second:
            (((tag),),) = await asking
            assert tag["tag"] == "valid"
            assert len(marks.read_text().splitlines()) == 2  # it ran twice
            second.send_signal(signal.SIGTERM)
            await until(lambda: second.poll() is not None)
            assert second.returncode == 0
    await until(lambda: not Path(f"/proc/{child}").exists() or "zombie" in Path(f"/proc/{child}/status").read_text())
    assert client.xlen("v") == 0
    assert client.xpending("v", GROUP)["pending"] == 0
    assert consumers(client) == 1  # the killed one's name; the other took its leave
    await front.close()


async def test_with_nobody_to_take_over_the_tag_is_unknown_within_the_budget(
    redis: tuple[str, Any], tmp_path: Path
) -> None:
    url, _ = redis
    config, marks = write_config(tmp_path, url_env="TEST_VALIDATORS_AT", stream="v"), tmp_path / "marks"
    front = asker(url, config)
    with worker(config, url) as only:
        asking = asyncio.create_task(front.validate(["text"], [{"name": "slow"}], 0.0, {}))
        assert (await asking)[0][0]["tag"] == "unknown"
        await until(marks.exists)
        only.send_signal(signal.SIGKILL)
        began = time.monotonic()
        found = await front.validate(["text"], [{"name": "slow"}], 0.5, {})
        assert found[0][0] == {"validator": "slow", "tag": "unknown", "why": "not there within 0.5 s"}
        assert time.monotonic() - began < 5.0
    await front.close()


async def test_rubbish_in_the_stream_is_dropped(redis: tuple[str, Any], tmp_path: Path) -> None:
    url, client = redis
    config = write_config(tmp_path, url_env="TEST_VALIDATORS_AT", stream="v")
    front = asker(url, config)
    job = b'{"spec":{"name":"json_syntax"},"text":"1","limit_s":9e9}'
    for data in [b"", b"\x80\x04K\x01.", b"{}", b"[" * 100_000, b'{"id":"i","reply":"elsewhere","job":' + job + b"}"]:
        client.xadd("v", {FIELD: data})
    with worker(config, url):
        found = await front.validate(["1"], [{"name": "json_syntax"}], PATIENCE_S, {})
        assert found[0][0]["tag"] == "valid"
        await until(lambda: client.xlen("v") == 0)
    assert not client.exists("elsewhere")  # answers go nowhere else
    await front.close()


async def test_jobs_that_nobody_waits_for_any_more_are_dropped(redis: tuple[str, Any], tmp_path: Path) -> None:
    url, client = redis
    config, marks = write_config(tmp_path, url_env="TEST_VALIDATORS_AT", stream="v"), tmp_path / "marks"
    order = b'{"id":"i","reply":"v:replies:a","job":{"spec":{"name":"slow"},"text":"1","limit_s":1}}'
    client.xadd("v", {FIELD: order}, id="1-1")  # from 1970
    with worker(config, url):
        await until(lambda: client.xlen("v") == 0)
    assert not marks.exists()


async def test_workers_outlive_redis(tmp_path: Path) -> None:
    config = write_config(tmp_path, url_env="TEST_VALIDATORS_AT", stream="v")
    try:
        first = redis_server.running()
        url, _ = first.__enter__()
    except RuntimeError as error:
        pytest.skip(str(error))
    front = asker(url, config)
    try:
        with worker(config, url):
            assert (await front.validate(["1"], [{"name": "json_syntax"}], PATIENCE_S, {}))[0][0]["tag"] == "valid"
            client = Redis.from_url(url)
            client.flushall()  # the stream and its group are gone, as after a restart without persistence
            client.client_kill_filter(_type="normal", skipme=True)
            found: list[Any] = []
            ends = time.monotonic() + PATIENCE_S
            while not found and time.monotonic() < ends:
                rows = await front.validate([f'"{time.monotonic()}"'], [{"name": "json_syntax"}], 3.0, {})
                found = [row for row in rows if row[0]["tag"] == "valid"]
            assert found
    finally:
        await front.close()
        first.__exit__(None, None, None)


async def test_tls(tmp_path: Path) -> None:
    certificate, key = _certificate(tmp_path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    options = ["--tls-port", str(port), "--tls-cert-file", str(certificate), "--tls-key-file", str(key)]
    try:
        with redis_server.running(*options, "--tls-auth-clients", "no") as _:
            url = f"rediss://:{redis_server.PASSWORD}@127.0.0.1:{port}/0"
            trusting, doubting = connect(f"{url}?ssl_ca_certs={certificate}", FAULTS), connect(url, FAULTS)
            assert await trusting.ping()
            with pytest.raises(Exception, match="certificate"):
                await doubting.ping()
            await trusting.aclose()
            await doubting.aclose()
    except RuntimeError as error:
        pytest.skip(str(error))


def _certificate(folder: Path) -> tuple[Path, Path]:
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .sign(key, hashes.SHA256())
    )
    (folder / "c.pem").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    (folder / "k.pem").write_bytes(
        key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
        )
    )
    return folder / "c.pem", folder / "k.pem"


def test_credentials_are_not_shown() -> None:
    assert shown("rediss://user:pa:ss@host:1/0 failed") == "rediss://***@host:1/0 failed"
    with pytest.raises(ValueError) as error:
        connect("http://user:hush@host", FAULTS)
    assert "hush" not in str(error.value)


@pytest.mark.parametrize(
    ("redis", "says"),
    [
        ({}, "applications[0].args.evidence.validators.redis: missing"),
        ({"url": "redis://h", "strem": "x"}, "evidence.validators.redis.strem: unknown key; did you mean 'stream'?"),
        ({"url": "redis://h", "url_env": "X"}, "redis needs url or url_env, and not both"),
    ],
)
def test_configuration_errors(redis: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as error:
        cli.load(write_config(tmp_path, **redis))
    assert says in str(error.value)


def test_command_line_errors(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([str(tmp_path / "none.yaml")]) == 2
    assert "no such file" in capsys.readouterr().err
    assert cli.main([str(write_config(tmp_path, url_env="TEST_VALIDATORS_UNSET"))]) == 2
    assert "TEST_VALIDATORS_UNSET" in capsys.readouterr().err
