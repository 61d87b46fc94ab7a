"""What a plugin imports from the documented `nat.plugin_api`: our plugin API and the names of test-time compute."""

from insitu.integrations.nat.ttc import (
    PipelineTypeEnum as PipelineTypeEnum,
)
from insitu.integrations.nat.ttc import (
    StageTypeEnum as StageTypeEnum,
)
from insitu.integrations.nat.ttc import (
    StrategyBase as StrategyBase,
)
from insitu.integrations.nat.ttc import (
    TTCItem as TTCItem,
)
from insitu.plugin_api import *  # noqa: F403
