"""A worker for the crew's tests, over the same pipes as the demo's: says, fails, sleeps or dies as it is told."""

import os
import sys
import threading
import time

import msgspec


class Setup(msgspec.Struct, frozen=True):
    name: str


class Say(msgspec.Struct, frozen=True, tag=True):
    word: str


class Fail(msgspec.Struct, frozen=True, tag=True):
    pass


class Sleep(msgspec.Struct, frozen=True, tag=True):
    seconds: float


class Die(msgspec.Struct, frozen=True, tag=True):
    pass


class Said(msgspec.Struct, frozen=True, tag=True):
    word: str


class Broken(msgspec.Struct, frozen=True, tag=True):
    error: str


ToyCommand = Say | Fail | Sleep | Die
ToyReply = Said | Broken


def decode(line: bytes) -> ToyReply:
    return msgspec.json.decode(line, type=ToyReply)


def failure(reply: ToyReply) -> str | None:
    return reply.error if isinstance(reply, Broken) else None


def main() -> None:
    setup = msgspec.json.decode(sys.argv[1], type=Setup)
    decoder = msgspec.json.Decoder(ToyCommand)
    commands: list[ToyCommand] = []
    arrived = threading.Semaphore(0)

    def read() -> None:
        for line in sys.stdin.buffer:
            commands.append(decoder.decode(line))
            arrived.release()
        os._exit(3)

    threading.Thread(target=read, daemon=True).start()
    while True:
        arrived.acquire()
        match commands.pop(0):
            case Say(word):
                reply: ToyReply = Said(f"{setup.name} says {word}")
            case Fail():
                reply = Broken("the cupboard is bare")
            case Sleep(seconds):
                time.sleep(seconds)
                reply = Said("awake")
            case Die():
                print("a last word", file=sys.stderr, flush=True)
                os._exit(7)
        sys.stdout.buffer.write(msgspec.json.encode(reply) + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
