"""Shells: asyncio and ZeroMQ around the core, engines and ranks. No policy lives here."""
