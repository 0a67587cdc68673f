"""Amounts of money in the user's own currency: `2.5`, `2.50EUR`, `$2.50`. Nothing is converted."""

from __future__ import annotations

import re
from dataclasses import dataclass

_AMOUNT = re.compile(
    r"\s*(?P<before>[^\d\s.,+-]{0,8})\s*(?P<number>[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:\.\d*)?)\s*(?P<after>[^\d\s.,]{0,8})\s*"
)


@dataclass(frozen=True, slots=True)
class Money:
    """An amount and the currency's symbol or code, as the user wrote it."""

    amount: float
    currency: str = ""

    @classmethod
    def parse(cls, text: str | float) -> Money:
        """`2.5`, `2.50EUR`, `EUR 2.50`, `$2.50`, `1,200 JPY`."""
        match = _AMOUNT.fullmatch(str(text)) if not isinstance(text, int | float) else None
        if isinstance(text, int | float):
            return cls(float(text))
        if not match or not any(c.isdigit() for c in match["number"]) or (match["before"] and match["after"]):
            raise ValueError(f"{text!r} is not an amount such as 2.50, 2.50EUR or $2.50")
        return cls(float(match["number"].replace(",", "")), match["before"] or match["after"])

    def of(self, amount: float) -> Money:
        """Another amount in this currency."""
        return Money(amount, self.currency)

    def __str__(self) -> str:
        number = f"{self.amount:,.2f}"
        if len(self.currency) == 1:  # a symbol
            return f"{self.currency}{number}"
        return f"{number} {self.currency}".rstrip()
