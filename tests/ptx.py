"""The few PTX instructions by which kernels widen numbers of 8 bits, in numpy: Triton's interpreter runs none."""

import re

import ml_dtypes
import numpy as np


def run(asm, words):
    """``$0`` and ``$1`` after inline assembly whose input register ``$2`` holds ``words``, which are uint32."""
    registers = {"$2": words}

    def value(name):
        return registers[name] if name in registers else np.full(words.shape, int(name, 0), np.uint32)

    body = asm.strip()
    body = body[1:-1] if body.startswith("{") else body
    for line in filter(str.strip, body.split(";")):
        name, *names = re.findall(r"[\w.$]+", line)
        if name == ".reg":
            continue
        elif name == "mov.b32" and len(names) == 3:
            registers[names[0]], registers[names[1]] = value(names[2]) & 0xFFFF, value(names[2]) >> 16
        elif name == "mov.b32":
            registers[names[0]] = value(names[1])
        elif name == "xor.b32":
            registers[names[0]] = value(names[1]) ^ value(names[2])
        elif name == "prmt.b32":
            registers[names[0]] = _selected(value(names[1]), value(names[2]), int(names[3], 0))
        elif name == "sub.f16x2":
            a, b = (np.ascontiguousarray(value(n)).view(np.float16) for n in names[1:])
            registers[names[0]] = (a - b).view(np.uint32)
        elif name == "cvt.rn.f16x2.e4m3x2":
            pairs = value(names[1]).astype(np.uint16).view(ml_dtypes.float8_e4m3fn)
            registers[names[0]] = pairs.astype(np.float16).view(np.uint32)
        else:
            raise NotImplementedError(name)
    return registers["$0"], registers["$1"]


def _selected(a, b, selector):
    """``prmt``: every digit of the selector, from the last on, picks one of four bytes of ``a`` and four of ``b``."""
    result = np.zeros_like(a)
    for place in range(4):
        digit = selector >> 4 * place & 15
        # With its highest bit it would repeat a sign.
        assert digit < 8
        result |= ((a, b)[digit // 4] >> 8 * (digit % 4) & 0xFF) << 8 * place
    return result


class Assembler:
    """Has Triton's interpreter run inline assembly; ``packs`` are the numbers of elements that one instance took."""

    def __init__(self, monkeypatch):
        from triton.runtime import interpreter

        self.packs = set()
        self.handle, self.language = interpreter.TensorHandle, interpreter.tl
        made = self

        def create_inline_asm(self, asm, constraints, values, types, pure, pack):
            return made.result(asm, constraints, values, len(types), pack)

        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_inline_asm", create_inline_asm)

    def result(self, asm, constraints, values, outputs, pack):
        self.packs.add(pack)
        (x,) = values
        assert constraints == "=r,=r,r"
        assert pack * x.data.itemsize == 4
        first, second = run(asm, np.ascontiguousarray(x.data).reshape(-1).view(np.uint32))
        arrays = [np.stack([first, second], 1)] if outputs == 1 else [first, second]
        arrays = [np.ascontiguousarray(a).view(np.float16).reshape(x.data.shape) for a in arrays]
        return _Results([self.handle(a, self.language.float16) for a in arrays])


class _Results(list):
    def get_result(self, index):
        return self[index]
