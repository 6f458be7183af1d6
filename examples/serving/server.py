"""Predictions over HTTP from all devices: requests that wait together go as one batch.

python examples/serving/server.py 8000
curl --data '[[0, 0, 5, 13, ...64 pixels from 0 to 16...]]' localhost:8000
{"digits": [0]}
"""

import json
import queue
import sys
import threading
from concurrent.futures import Future
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import jax
import jax.numpy as jnp
import multitower as mt
import numpy as np
import optax
from sklearn.datasets import load_digits

ROWS = 64  # of every batch that the devices get: one shape, so one compilation


def train():
    """A small network that knows the digits; a real server would restore a checkpoint."""
    images, labels = load_digits(return_X_y=True)
    keys = jax.random.split(jax.random.key(0))
    params = [jax.random.normal(keys[0], (64, 64)) / 8, jax.random.normal(keys[1], (64, 10)) / 8]

    def losses(params, batch):
        logits = scores(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])

    step = mt.train_step(losses, optax.adam(3e-3))
    state = step.init(params)
    for _ in range(100):
        state, _ = step(state, {"x": images.astype(np.float32), "y": labels})
    return state.params


def scores(params, images):
    return jax.nn.relu(images / 16 @ params[0]) @ params[1]


class Predictor:
    """Puts rows of all who wait together; its thread alone talks to the devices."""

    def __init__(self, params):
        predict = lambda params, images: jnp.argmax(scores(params, images), -1)
        self._predict = mt.make_parallel(predict, in_axes=(None, 0))
        self._params = params
        self._waiting = queue.Queue()
        threading.Thread(target=self._work, daemon=True).start()

    def __call__(self, images):
        """Digits of images, shape (rows, 64); may be called from many threads."""
        pieces = [images[start : start + ROWS] for start in range(0, len(images), ROWS)]
        answers = [(piece, Future()) for piece in pieces]
        for answer in answers:
            self._waiting.put(answer)
        return np.concatenate([future.result() for _, future in answers])

    def _work(self):
        late = None  # what did not fit into the batch before
        while True:
            batch = [late or self._waiting.get()]
            late = None
            while sum(len(rows) for rows, _ in batch) < ROWS and not self._waiting.empty():
                late = self._waiting.get()
                if sum(len(rows) for rows, _ in [*batch, late]) > ROWS:
                    break
                batch.append(late)
                late = None
            self._answer(batch)

    def _answer(self, batch):
        rows = np.concatenate([rows for rows, _ in batch])
        try:
            filled = np.resize(rows, (ROWS, rows.shape[1]))  # repeats rows; they are cut off below
            digits = np.asarray(self._predict(self._params, filled))
        except Exception as error:
            for _, future in batch:
                future.set_exception(error)
            return
        for part, future in batch:
            future.set_result(digits[: len(part)])
            digits = digits[len(part) :]


def make_server(port, predictor):
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            try:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                images = np.asarray(json.loads(body), np.float32)
                if images.ndim != 2 or images.shape[1] != 64 or not len(images):
                    raise ValueError(f"send images of 64 pixels, not shape {images.shape}")
                self._reply(200, {"digits": predictor(images).tolist()})
            except ValueError as error:
                self._reply(400, {"error": str(error)})

        def _reply(self, code, content):
            self.send_response(code)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps(content).encode())

        def log_message(self, *_):
            pass

    return ThreadingHTTPServer(("127.0.0.1", port), Handler)


if __name__ == "__main__":
    server = make_server(int(sys.argv[1]) if len(sys.argv) > 1 else 8000, Predictor(train()))
    print(f"on {len(mt.devices())} devices, port {server.server_port}")
    server.serve_forever()
