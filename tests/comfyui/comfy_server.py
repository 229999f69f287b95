# SPDX-License-Identifier: Apache-2.0
"""A real ComfyUI server, as tests/comfyui/real starts it. Standard library only."""

import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))
import harness


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


class PromptError(AssertionError):
    pass


class Server:
    def __init__(self, root, python, base, environment, log):
        self.root, self.python, self.base, self.environment, self.log = root, python, base, environment, log
        self.process = None

    def start(self):
        """Within 180 s; importing torch and ComfyUI takes most of it."""
        self.port = free_port()
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                [self.python, os.path.join(self.root, "main.py"), "--cpu", "--port", str(self.port), "--base-directory", str(self.base),
                 "--disable-api-nodes", "--database-url", "sqlite:///:memory:", "--use-pytorch-cross-attention", "--preview-method", "latent2rgb"],
                env=self.environment, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        harness.wait_until("ComfyUI answers", 180, self._answers, step=0.3)
        return self

    def _answers(self):
        if self.process.poll() is not None:
            raise harness.HarnessError(f"ComfyUI ended with {self.process.returncode}; its log is {self.log}")
        try:
            return self.get("/queue") is not None
        except OSError:
            return False

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=120) as r:
            return json.load(r)

    def post(self, path, body):
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=300) as r:
                text = r.read()
        except urllib.error.HTTPError as e:
            raise PromptError(f"{path}: {e.code}: {e.read().decode(errors='replace')[:2000]}") from e
        return json.loads(text) if text else None

    def submit(self, prompt):
        return self.post("/prompt", {"prompt": prompt, "client_id": "test"})["prompt_id"]

    def finished(self, prompt_id):
        """The history's status once it has one: {"status_str", "completed", "messages"}, else None."""
        try:
            found = self.get(f"/history/{prompt_id}").get(prompt_id)
        except TimeoutError:  # a busy machine
            return None
        return found["status"] if found and found.get("status") else None

    def wait(self, prompt_id, seconds=300, step=0.2):
        return harness.wait_until(f"prompt {prompt_id}", seconds, lambda: self.finished(prompt_id), step=step)

    def run(self, prompt, seconds=300):
        """Raises PromptError with ComfyUI's own words if it fails."""
        status = self.wait(self.submit(prompt), seconds)
        if status["status_str"] != "success":
            last = [m for m in status["messages"] if m[0] == "execution_error"]
            raise PromptError(last[0][1]["exception_message"] if last else str(status["messages"][-1]))
        return status

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def stop(self):
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.kill()


def messages_of(status, kind):
    return [m[1] for m in status["messages"] if m[0] == kind]
