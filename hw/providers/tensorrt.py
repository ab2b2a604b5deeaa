"""NVIDIA GPUs by TensorRT, and by TensorRT-RTX, its build for desktops."""

from hw.providers.profile import ProviderProfile, Wheel

TENSORRT = ProviderProfile(
    name="tensorrt",
    title="NVIDIA GPU by TensorRT",
    execution_provider="TensorrtExecutionProvider",
    wheel=Wheel("onnxruntime-gpu"),
    options={"trt_max_workspace_size": str(1 << 30)},  # bytes; by default all of the GPU, the target's too
    shapes="static",  # an engine is built for a range of shapes, minutes each; KV that grows leaves any range
    weights=("QuantizeLinear", "DequantizeLinear"),
    kv_dtype="float16",
    shared_kv=False,
    cannot=(
        "compute ONNX Runtime's own operators, GroupQueryAttention and MatMulNBits among them",
        "start in seconds: engines are built first",
    ),
)

RTX = ProviderProfile(
    name="tensorrt-rtx",
    title="NVIDIA RTX GPU by TensorRT-RTX",
    execution_provider="NvTensorRTRTXExecutionProvider",
    wheel=Wheel("onnxruntime-ep-nv-tensorrt-rtx-cu12", "onnxruntime_ep_nv_tensorrt_rtx"),
    devices=("GPU",),
    weights=("QuantizeLinear", "DequantizeLinear"),
    kv_dtype="float16",
    shared_kv=False,
    cannot=("keep KV in host memory: attention is part of the engine",),
)
