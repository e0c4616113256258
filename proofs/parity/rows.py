"""Made rows of the shapes that people bring, the same each time."""

from __future__ import annotations

import random
from typing import Any

Row = dict[str, Any]
WORDS = (
    "the", "a", "model", "block", "weight", "gradient", "host", "device", "stream", "copy", "moves",
    "learns", "reads", "writes", "adds", "large", "small", "exact", "slow", "fast", "first", "last",
    "two", "three", "four", "and", "of", "to", "in", "with", "once", "again", "why", "how",
)  # fmt: skip
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"Return the {name} of a place.",
            "parameters": {
                "type": "object",
                "properties": {"place": {"type": "string"}},
                "required": ["place"],
            },
        },
    }
    for name in ("weather", "time")
]


class Rows:
    """Makes rows from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def words(self, most: int = 14) -> str:
        return " ".join(self._draw.choices(WORDS, k=self._draw.randint(2, most)))

    def text(self, count: int, most: int = 30) -> list[Row]:
        return [{"text": self.words(most)} for _ in range(count)]

    def pairs(self, count: int, ends: str = "") -> list[Row]:
        """Prompt and completion as plain strings."""
        return [
            {"prompt": f"{self.words()}:", "completion": f" {self.words()}{ends}"}
            for _ in range(count)
        ]

    def chat_pairs(self, count: int) -> list[Row]:
        """Prompt and completion as messages."""
        return [
            {
                "prompt": [{"role": "user", "content": self.words()}],
                "completion": [{"role": "assistant", "content": self.words()}],
            }
            for _ in range(count)
        ]

    def chats(self, count: int, turns: int = 1, system: bool = False) -> list[Row]:
        rows = []
        for _ in range(count):
            messages = [{"role": "system", "content": self.words()}] if system else []
            for _ in range(turns):
                messages += [
                    {"role": "user", "content": self.words()},
                    {"role": "assistant", "content": self.words()},
                ]
            rows.append({"messages": messages})
        return rows

    def from_value(self, count: int, turns: int = 2) -> list[Row]:
        """ShareGPT's keys; TRL leaves its role names `human` and `gpt` as they are."""
        return [
            {
                "conversations": [
                    {"from": who, "value": self.words()}
                    for _ in range(turns)
                    for who in ("user", "assistant")
                ]
            }
            for _ in range(count)
        ]

    def thoughts(self, count: int, turns: int = 1) -> list[Row]:
        rows = self.chats(count, turns)
        for row in rows:
            for message in row["messages"]:
                if message["role"] == "assistant":
                    message["reasoning_content"] = self.words()
        return rows

    def tool_chats(self, count: int, calls: int = 1) -> list[Row]:
        """A question, calls of tools, their answers, the answer; then small talk."""
        return [self._tool_chat(calls) for _ in range(count)]

    def _tool_chat(self, calls: int) -> Row:
        names = [tool["function"]["name"] for tool in TOOLS]  # type: ignore[index]
        called = [
            {
                "type": "function",
                "function": {
                    "name": self._draw.choice(names),
                    "arguments": {"place": self.words(3)},
                },
            }
            for _ in range(calls)
        ]
        answers = [{"role": "tool", "content": self.words(6)} for _ in range(calls)]
        return {
            "messages": [
                {"role": "user", "content": self.words()},
                {"role": "assistant", "content": self.words(5), "tool_calls": called},
                *answers,
                {"role": "assistant", "content": self.words()},
                {"role": "user", "content": self.words()},
                {"role": "assistant", "content": self.words()},
            ],
            "tools": TOOLS,
        }
