"""Huawei's Ascend NPUs."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="cann",
    title="Huawei Ascend NPU",
    execution_provider="CANNExecutionProvider",
    wheel=Wheel("onnxruntime-cann"),
    options={
        "arena_extend_strategy": "kSameAsRequested",  # several replicas share a device
        "precision_mode": "must_keep_origin_dtype",  # the default turns everything to 16 bits
        "enable_cann_graph": "0",  # a graph is compiled for each new shape, and every prompt has one
    },
    weights=("QuantizeLinear", "DequantizeLinear", "MatMul"),
    cannot=("compute ONNX Runtime's own operators: attention and 4-bit weights stay with the CPU provider",),
)
