"""Every shape a row may come in, and the one row it means."""

from __future__ import annotations

from typing import Any

Q, A = "What is two and two?", "Four."
Q2, A2 = "And three and three?", "Six, I think."
SYSTEM = "You are brief."

SINGLE = (("user", Q), ("assistant", A))
DOUBLE = (*SINGLE, ("user", Q2), ("assistant", A2))
WITH_SYSTEM = (("system", SYSTEM), *SINGLE)


def turns(said: Any, role: str = "role", content: str = "content", **names: str) -> list[Any]:
    return [{role: names.get(who, who), content: text} for who, text in said]


SHAPES: dict[str, tuple[dict[str, Any], tuple[tuple[str, str], ...], str]] = {
    "messages": ({"messages": turns(DOUBLE)}, DOUBLE, "detected: messages (role, content)"),
    "messages with system": (
        {"messages": turns(WITH_SYSTEM)},
        WITH_SYSTEM,
        "detected: messages (role, content)",
    ),
    "messages of a model": (
        {"messages": turns(DOUBLE, assistant="model")},
        DOUBLE,
        "detected: messages (role, content)",
    ),
    "conversations": (
        {"conversations": turns(DOUBLE, "from", "value", user="human", assistant="gpt")},
        DOUBLE,
        "detected: conversations (from, value)",
    ),
    "conversations with system": (
        {"conversations": turns(WITH_SYSTEM, "from", "value", user="human", assistant="gpt")},
        WITH_SYSTEM,
        "detected: conversations (from, value)",
    ),
    "conversations with role": (
        {"conversations": turns(DOUBLE)},
        DOUBLE,
        "detected: conversations (role, content)",
    ),
    "messages with value": (
        {"messages": turns(DOUBLE, "from", "value")},
        DOUBLE,
        "detected: messages (from, value)",
    ),
    "roles in capitals": (
        {"messages": turns(DOUBLE, user="User", assistant="ASSISTANT")},
        DOUBLE,
        "detected: messages (role, content)",
    ),
    "alpaca": ({"instruction": Q, "output": A}, SINGLE, "detected: alpaca (instruction, output)"),
    "alpaca with empty input": (
        {"instruction": Q, "input": "", "output": A},
        SINGLE,
        "detected: alpaca (instruction, input, output)",
    ),
    "alpaca with input": (
        {"instruction": "Add.", "input": "2, 2", "output": A},
        (("user", "Add.\n2, 2"), ("assistant", A)),
        "detected: alpaca (instruction, input, output)",
    ),
    "alpaca with system": (
        {"instruction": Q, "output": A, "system": SYSTEM},
        WITH_SYSTEM,
        "detected: alpaca (instruction, output, system)",
    ),
    "alpaca with history": (
        {"instruction": Q2, "output": A2, "history": [[Q, A]]},
        DOUBLE,
        "detected: alpaca (instruction, output, history)",
    ),
    "conversations and system": (
        {"conversations": turns(SINGLE, "from", "value", user="human"), "system": SYSTEM},
        WITH_SYSTEM,
        "detected: conversations (from, value)",
    ),
    "prompt / completion of turns": (
        {"prompt": turns(DOUBLE[:3]), "completion": turns(DOUBLE[3:])},
        DOUBLE,
        "detected: prompt / completion",
    ),
    "prompt / completion": (
        {"prompt": Q, "completion": A},
        SINGLE,
        "detected: prompt / completion",
    ),
    "query / response": ({"query": Q, "response": A}, SINGLE, "detected: query / response"),
    "question / answer": (
        {"question": Q, "answer": A, "id": "7"},
        SINGLE,
        "detected: question / answer",
    ),
}
