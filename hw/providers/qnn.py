"""Qualcomm's Hexagon NPU (HTP); on x86 the wheel carries an emulator of it."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="qnn",
    title="Qualcomm Hexagon NPU",
    execution_provider="QNNExecutionProvider",
    wheel=Wheel("onnxruntime-qnn", "onnxruntime_qnn"),
    devices=("NPU", "CPU"),  # the emulator calls itself a CPU
    options={
        "backend_type": "htp",
        # Named for the emulator, which fails to allocate without them; a phone or laptop knows its own.
        "soc_model": "60",
        "htp_arch": "73",
    },
    shapes="static",  # the HTP compiler takes no open dimension
    weights=("QuantizeLinear", "DequantizeLinear"),
    cannot=(
        "compute GroupQueryAttention, SkipSimplifiedLayerNormalization or GatherBlockQuantized: they stay with the CPU provider",
        "show a speed on x86: the emulator computes what the NPU would, some hundred times slower",
    ),
)
