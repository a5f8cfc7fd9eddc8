"""The newest figures for Prometheus, over HTTP.

Owns the server, which has a thread of prometheus_client's. Must not be asked for anything that is
not written here: scrapes come from another thread.
"""

import re
from collections.abc import Iterator
from typing import Any

from lightrl.errors import ConfigError
from lightrl.system.addresses import ALL_HOSTS, WILDCARD, split_address

_NOT_IN_NAMES = re.compile(r"[^a-zA-Z0-9_:]")


class PrometheusServer:
    """Serves `http://ADDRESS/metrics` from its construction until `close`."""

    def __init__(self, address: str, run: str) -> None:
        """`address`: host and port, as `split_address` reads them. Raises ConfigError, one line, if
        it cannot be served."""
        try:
            import prometheus_client
        except ModuleNotFoundError:
            raise ConfigError(
                f"logging.prometheus = {address!r}: not installed: pip install prometheus-client"
            ) from None
        found = split_address(address)
        assert found is not None  # the config says so
        host, port = found
        self._run = run
        self._values: dict[str, float] = {}
        registry = prometheus_client.CollectorRegistry()
        registry.register(self)  # pyright: ignore[reportArgumentType] - anything with `collect`
        try:
            self._server, self._thread = prometheus_client.start_http_server(
                port, WILDCARD if host in ALL_HOSTS else host, registry
            )
        except OSError as e:
            raise ConfigError(f"logging.prometheus = {address!r}: {e.strerror}") from None
        self.port = self._server.server_port

    def write(self, record: dict[str, float]) -> None:
        """What is not in the record stays as it was."""
        self._values = {**self._values, **record}  # replaced whole: scrapes see one or the other

    def collect(self) -> Iterator[Any]:
        """What prometheus_client asks for at every scrape."""
        from prometheus_client.core import GaugeMetricFamily

        for name, value in self._values.items():
            gauge = GaugeMetricFamily(exposed(name), name, labels=["run"])
            gauge.add_metric([self._run], value)
            yield gauge

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


def exposed(name: str) -> str:
    """Example: exposed("eval/gsm8k/avg@4") == "lightrl_eval_gsm8k_avg_4"."""
    return f"lightrl_{_NOT_IN_NAMES.sub('_', name)}"
