"""The circuit breaker of one draft."""

from deployments.chain.circuit import Circuit
from deployments.chain.faults import FaultPolicy

FAULTS = FaultPolicy(circuit_failures=3, circuit_pause_s=1.0, circuit_pause_max_s=4.0)


def test_opens_after_failures_in_a_row_and_probes() -> None:
    circuit = Circuit(FAULTS)
    circuit.failure(0.0)
    circuit.failure(0.1)
    circuit.success()
    for now in (1.0, 1.1):
        circuit.failure(now)
        assert circuit.allows(now)
    circuit.failure(1.2)
    assert circuit.open
    assert not circuit.allows(2.1)
    assert circuit.allows(2.2)  # the probe
    circuit.success()
    assert not circuit.open


def test_pause_doubles_up_to_its_bound() -> None:
    circuit = Circuit(FAULTS)
    now, pauses = 0.0, []
    for _ in range(2):
        circuit.failure(now)
    for _ in range(5):
        circuit.failure(now)
        start = now
        while not circuit.allows(now):
            now += 0.25
        pauses.append(now - start)
    assert pauses == [1.0, 2.0, 4.0, 4.0, 4.0]


def test_a_success_resets_the_pause() -> None:
    circuit = Circuit(FAULTS)
    for _ in range(5):
        circuit.failure(0.0)
    circuit.success()
    for _ in range(3):
        circuit.failure(10.0)
    assert circuit.allows(11.0)
