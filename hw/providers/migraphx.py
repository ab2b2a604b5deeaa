"""AMD GPUs by ROCm's MIGraphX; ONNX Runtime's older ROCm provider is no longer built."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="migraphx",
    title="AMD GPU by MIGraphX",
    execution_provider="MIGraphXExecutionProvider",
    wheel=Wheel("onnxruntime-migraphx"),
    options={"migraphx_fp16_enable": "0"},  # 16 bits would count as disagreement with the CPU
    shapes="static",  # a program is compiled for each shape
    weights=("QuantizeLinear", "DequantizeLinear", "MatMul"),
    shared_kv=False,
    cannot=("keep KV in host memory: attention is part of the program",),
)
