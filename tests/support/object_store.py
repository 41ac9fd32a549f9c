"""Store of objects: moto's server of the S3 protocol, which may be slow, or fail, and counts what it is asked for."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

BUCKET = "data"


@dataclass
class ObjectStore:
    """Server of one bucket.

    Parameters
    ----------
    port : of this machine.
    delay : seconds that each answer takes longer.
    failing : of so many requests for bytes of an object, one is answered by 503; 0: none.
    forbidden : requests for bytes of objects of this folder are answered by 403; "": none.
    requests, sent : requests for objects so far, and bytes of their contents that were sent.
    """

    port: int = 0
    delay: float = 0.0
    failing: int = 0
    forbidden: str = ""
    requests: int = 0
    sent: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which clients find the server."""
        return {
            "AWS_ENDPOINT_URL": self.address,
            "AWS_ACCESS_KEY_ID": "key",
            "AWS_SECRET_ACCESS_KEY": "never shown",
            "AWS_REGION": "us-east-1",
        }

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def forget(self) -> None:
        """Begin to count anew."""
        self.requests = self.sent = 0

    def put(self, path: Path, key: str) -> str:
        """Copy a file, or a folder, to the store and return its URL."""
        import obstore
        from obstore.store import S3Store

        store = S3Store(
            BUCKET, endpoint=self.address, access_key_id="key", secret_access_key="never shown", region="us-east-1",
            client_options={"allow_http": True},
        )  # fmt: skip
        files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path]
        for file in files:
            name = f"{key}/{file.relative_to(path).as_posix()}" if path.is_dir() else key
            obstore.put(store, name, file.read_bytes())
        return f"s3://{BUCKET}/{key}"

    def application(self, wrapped: Any) -> Any:
        """Return the application of the server with delays, failures and counters."""

        def answer(environ: dict[str, Any], start_response: Any) -> Any:
            is_read = environ["REQUEST_METHOD"] == "GET" and environ["PATH_INFO"].strip("/") != BUCKET
            with self.lock:
                self.requests += 1
                fails = is_read and self.failing > 0 and self.requests % self.failing == 0
            time.sleep(self.delay)
            if is_read and self.forbidden and environ["PATH_INFO"].startswith(f"/{BUCKET}/{self.forbidden}/"):
                start_response("403 Forbidden", [("Content-Length", "0")])
                return [b""]
            if fails:
                start_response("503 Slow Down", [("Content-Length", "0")])
                return [b""]
            body = b"".join(wrapped(environ, start_response))
            if is_read:
                with self.lock:
                    self.sent += len(body)
            return [body]

        return answer


@contextmanager
def object_store() -> Iterator[ObjectStore]:
    """Context manager: a running server, with an empty bucket."""
    import boto3
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
    from werkzeug.serving import make_server

    store = ObjectStore()
    application = store.application(DomainDispatcherApplication(create_backend_app))
    server = make_server("127.0.0.1", 0, application, threaded=True)
    store.port = server.server_port
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    # A collection in a thread of the server may free objects of h5py, whose lock has the thread that waits for it.
    gc.disable()
    try:
        client = boto3.client(
            "s3", endpoint_url=store.address, aws_access_key_id="key", aws_secret_access_key="never shown",
            region_name="us-east-1",
        )  # fmt: skip
        client.create_bucket(Bucket=BUCKET)
        yield store
    finally:
        gc.enable()
        server.shutdown()
        thread.join()
