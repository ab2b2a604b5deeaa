"""Base of every configuration section."""

from pydantic import BaseModel, ConfigDict


class Strict(BaseModel):
    """Unknown keys are errors; nothing changes after loading."""

    model_config = ConfigDict(extra="forbid", frozen=True)
