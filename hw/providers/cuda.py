"""NVIDIA GPUs."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="cuda",
    title="NVIDIA GPU",
    execution_provider="CUDAExecutionProvider",
    wheel=Wheel("onnxruntime-gpu"),
    options={
        # The arena doubles by default: beside a target that has most of the GPU, that is an allocation that fails.
        "arena_extend_strategy": "kSameAsRequested",
        "use_tf32": "0",  # 10 bits of mantissa would count as disagreement with the CPU
    },
    weights=("MatMulNBits", "MatMul"),
    kv_dtype="float16",
    shared_kv=False,
    cannot=("keep KV in host memory: attention has a kernel on the GPU",),
)
