"""Codes to values that are exact in the operand type, eight or four at a time: the inline assembly of all products."""

import triton.language as tl

# A word holds eight codes: the even inputs' in bits 3..6 of its bytes, the odd ones' in the same bits of the word
# rotated right by 4 (`kernels.repack` puts them there). A bf16 with upper byte 0x41 and lower byte 0x80 + 8q is 16 + q,
# so two masks, a rotation and moving bytes are all that the conversion takes.
UNPACK_4 = tl.constexpr("""
{
.reg .b32 even, odd;
lop3.b32 even, $4, 0x78787878, 0x80808080, 0xEA;
shf.r.wrap.b32 odd, $4, $4, 4;
lop3.b32 odd, odd, 0x78787878, 0x80808080, 0xEA;
prmt.b32 $0, even, 0x41414141, 0x4140;
prmt.b32 $1, even, 0x41414141, 0x4342;
prmt.b32 $2, odd, 0x41414141, 0x4140;
prmt.b32 $3, odd, 0x41414141, 0x4342;
}
""")

# An fp16 with upper byte 0x64 and lower byte q is 1024 + q; adding -1152 leaves q - 128, exactly.
UNPACK_8 = tl.constexpr("""
{
.reg .b32 low, high, offset;
mov.b32 offset, 0xE480E480;
prmt.b32 low, $2, 0x64646464, 0x4140;
prmt.b32 high, $2, 0x64646464, 0x4342;
add.rn.f16x2 $0, low, offset;
add.rn.f16x2 $1, high, offset;
}
""")
