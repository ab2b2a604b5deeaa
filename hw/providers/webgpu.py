"""Any GPU with Vulkan, Metal or Direct3D 12, as a plug-in of the plain ONNX Runtime."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="webgpu",
    title="any GPU by WebGPU",
    execution_provider="WebGpuExecutionProvider",
    wheel=Wheel("onnxruntime-ep-webgpu", "onnxruntime_ep_webgpu"),
    devices=("GPU",),
    kv_dtype="float16",
    shared_kv=False,
    cannot=(
        "run without a GPU: its virtual device only compiles",
        "keep KV in host memory: attention has a kernel on the GPU",
    ),
)
