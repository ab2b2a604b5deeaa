"""ONNX Runtime's own kernels: in every build, and what all others are compared with."""

from hw.providers.profile import CPU, ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="cpu",
    title="any CPU",
    execution_provider=CPU,
    wheel=Wheel("onnxruntime"),
    # Without the arena the scratch memory of one long prompt goes back to the system; decoding is no slower.
    memory_arena=False,
    copies_inputs=False,
    cannot=(
        "attend for several sequences and several tokens at once when they have a past",
        "append quantised KV in place with a checked result",
        "16-bit floating point KV",
    ),
    proof="draft",
)
