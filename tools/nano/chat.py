"""Conversations in Gemma's turn form, made from documented functions: what is asked is the docstring.

A conversation is a list of (role, text); `render` gives the text that the tokenizer turns into ids.
"""

from __future__ import annotations

import ast
import hashlib
import random
import textwrap
import warnings

Conversation = list[tuple[str, str]]

ASK_CODE = (
    "Write a Python function `{name}` that does this:\n{doc}",
    "Write `{name}` in Python. {doc}",
    "Please implement this function.\n\n{signature}\n\n{doc}",
    "I need a Python function. {doc}",
    "{doc}\n\nWrite the code for it.",
)
ASK_DOC = ("What does it do?", "Explain the function.", "Write a docstring for it.", "Can you describe it in words?")
ASK_MEANING = ("What does this function do?\n\n{code}", "Explain this code.\n\n{code}", "Document this.\n\n{code}")
MIN_DOC, MAX_DOC, MIN_CODE, MAX_CODE = 40, 900, 80, 2400


def render(conversation: Conversation) -> str:
    """`<bos>`, then every turn between its markers, a newline after each."""
    turns = (f"<|turn>{role}\n{text.strip()}<turn|>\n" for role, text in conversation)
    return "<bos>" + "".join(turns)


def documented_functions(source: str) -> list[tuple[str, str, str, str]]:
    """(name, signature line, docstring, code without the docstring) of every documented function in a file."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    lines = source.splitlines()
    found: list[tuple[str, str, str, str]] = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) or len(node.body) < 2:
            continue
        doc = ast.get_docstring(node)
        first = node.body[0]
        if doc is None or not MIN_DOC <= len(doc) <= MAX_DOC or first.end_lineno is None or node.end_lineno is None:
            continue
        if first.lineno <= node.lineno:
            continue
        header = lines[node.lineno - 1 : first.lineno - 1]
        code = textwrap.dedent("\n".join(header + lines[first.end_lineno : node.end_lineno]))
        signature = textwrap.dedent("\n".join(header)).strip()
        if MIN_CODE <= len(code) <= MAX_CODE:
            found.append((node.name, signature, doc, code.strip("\n")))
    return found


def conversations(source: str) -> list[Conversation]:
    """One conversation per documented function of a file; a third of them with a second question."""
    result: list[Conversation] = []
    for name, signature, doc, code in documented_functions(source):
        rng = random.Random(hashlib.sha256((name + doc).encode()).digest())
        fenced = f"```python\n{code}\n```" if rng.random() < 0.7 else code
        if rng.random() < 0.2:
            question = rng.choice(ASK_MEANING).format(code=fenced)
            result.append([("user", question), ("model", doc)])
            continue
        question = rng.choice(ASK_CODE).format(name=name, signature=signature, doc=doc)
        turns: Conversation = [("user", question), ("model", fenced)]
        if rng.random() < 0.33:
            turns += [("user", rng.choice(ASK_DOC)), ("model", doc)]
        result.append(turns)
    return result


def doc_key(conversation: Conversation) -> bytes:
    """What makes two conversations the same: the words of their model turns, in any spacing."""
    words = " ".join(" ".join(text.split()) for role, text in conversation if role == "model")
    return hashlib.sha256(words.encode()).digest()
