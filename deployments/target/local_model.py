"""Skip Ray's model download: our models are folders, and its download task costs a process start on every replica."""

from ray.llm._internal.common.callbacks.base import CallbackBase


class LocalModel(CallbackBase):
    """Callback of the LLM deployment."""

    async def on_before_node_init(self) -> None:
        self.ctx.run_init_node = False
