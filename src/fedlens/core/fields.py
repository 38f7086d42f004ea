"""Ranges of hyper-parameters, as types of fields; checked when a configuration is read."""

from typing import Annotated

from annotated_types import Ge, Gt, Le, Lt

Count = Annotated[int, Ge(1)]
Several = Annotated[int, Ge(2)]
Number = Annotated[int, Ge(0)]
Positive = Annotated[float, Gt(0)]
NonNegative = Annotated[float, Ge(0)]
Share = Annotated[float, Ge(0), Le(1)]
Momentum = Annotated[float, Ge(0), Lt(1)]
Part = Annotated[float, Ge(0), Lt(1)]  # never the whole
Open = Annotated[float, Gt(0), Lt(1)]
Percent = Annotated[float, Ge(0), Le(100)]
