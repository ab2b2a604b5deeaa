"""Intel CPUs, GPUs and NPUs by OpenVINO, as a plug-in of the plain ONNX Runtime."""

from hw.providers.profile import ProviderProfile, Wheel

PROFILE = ProviderProfile(
    name="openvino",
    title="Intel CPU, GPU, NPU",
    execution_provider="OpenVINOExecutionProvider",
    wheel=Wheel("onnxruntime-ep-openvino", "onnxruntime_ep_openvino"),
    # Its GPU and NPU were not at hand, and the NPU compiles fixed shapes only.
    devices=("CPU",),
    thread_option="num_of_threads",  # without it OpenVINO takes every core, the target's too
    memory_arena=False,
    cannot=(
        "list a CPU that is not Intel's (release 1.8.1 of the plug-in)",
        "compute GroupQueryAttention: it stays with the CPU provider, which cuts the graph at every layer",
        "be faster than the CPU provider for one token of a small model: a subgraph costs more to enter than its layer to compute",
    ),
    proof="draft",
)
