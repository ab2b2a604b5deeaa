"""Any GPU or NPU with Direct3D 12, on Windows."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="dml",
    title="Windows GPU, NPU by DirectML",
    execution_provider="DmlExecutionProvider",
    wheel=Wheel("onnxruntime-directml"),
    memory_pattern=False,  # the provider refuses a session that plans memory ahead
    kv_dtype="float16",
    shared_kv=False,
    cannot=("keep KV in host memory: attention has a kernel on the device", "run outside Windows"),
)
