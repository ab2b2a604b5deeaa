"""Apple's Neural Engine and GPUs; the plain wheel for macOS has it."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="coreml",
    title="Apple Neural Engine, GPU",
    execution_provider="CoreMLExecutionProvider",
    wheel=Wheel("onnxruntime"),
    options={"ModelFormat": "MLProgram"},  # the default, older format knows fewer operators
    weights=("MatMul",),
    cannot=(
        "compute ONNX Runtime's own operators: attention and 4-bit weights stay with the CPU provider",
        "run outside macOS",
    ),
)
