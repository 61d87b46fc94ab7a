#!/usr/bin/env python3
"""Edits `calculator.py` until its tests pass: a coding agent that knows nothing about insitu.

    ./agent.py FUNCTION

Its model says by which expression the body of the function is replaced. It works in the current folder, and takes its
model's address from the environment, as the clients of OpenAI do.
"""

import http.client
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

EDITS = 2
EXPRESSION = re.compile(r"[ab+\-*/%(), ]+|(min|max)\(a, b\)")
CODE = Path("calculator.py")


def ask(messages: list) -> str:
    server = urlsplit(os.environ["OPENAI_BASE_URL"])
    connection = http.client.HTTPConnection(server.netloc)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {os.environ['OPENAI_API_KEY']}"}
    body = json.dumps({"model": "any", "messages": messages})
    connection.request("POST", f"{server.path}/chat/completions", body, headers)
    response = connection.getresponse()
    if response.status != 200:
        sys.exit(f"the model's server answered {response.status}: {response.read().decode()}")
    return json.load(response)["choices"][0]["message"]["content"]


def edit(function: str, expression: str) -> bool:
    """Whether the expression could be one."""
    if EXPRESSION.fullmatch(expression):
        code = CODE.read_text()
        CODE.write_text(re.sub(rf"(def {function}\(a, b\):\n    return ).*", rf"\g<1>{expression}", code))
        return True
    return False


function = sys.argv[1]
messages = []
for number in range(1, EDITS + 1):
    messages.append({"role": "user", "content": f"The tests of {function} fail. What does it return?"})
    answer = ask(messages)
    messages.append({"role": "assistant", "content": answer})
    tests = [sys.executable, "-B", "tests.py", function]  # bytecode of the same second would hide an edit
    if edit(function, answer) and subprocess.run(tests, capture_output=True).returncode == 0:
        print(f"{function} passes after {number} edits")
        break
else:
    print(f"{function} fails after {EDITS} edits")
