"""Faster forms of six operations on vectors in Inductor's C++ code, for tensors of fewer than 32 bits.

Inductor computes in vectors of as many elements as a vector has floats. So a vector of bfloat16 numbers or of bytes is
loaded and stored in part, which Vectorized does with a mask. A load waits for a masked store that it overlaps, and the
next part always does. Inductor casts the bits of a vector element by element, through memory, and so does Vectorized
convert integers to bytes and find the largest of the integers of a vector. It rounds to bfloat16 with many operations,
also numbers that are rounded already. A pattern that another version of torch writes differently is left as it is.
"""

from __future__ import annotations

import re

HELPERS = """
#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>
#if defined(CPU_CAPABILITY_AVX512) || defined(CPU_CAPABILITY_AVX2)
#include <immintrin.h>
#endif

// the first COUNT elements of a vector from memory; the others are undefined
template <typename T, int COUNT>
static inline at::vec::Vectorized<T> load_part(const T* from) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (COUNT * sizeof(T) == 32)
        return _mm512_castsi256_si512(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
    if constexpr (COUNT * sizeof(T) == 16)
        return _mm512_castsi128_si512(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(CPU_CAPABILITY_AVX2)
    if constexpr (COUNT * sizeof(T) == 16)
        return _mm256_castsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#endif
    return at::vec::Vectorized<T>::loadu(from, COUNT);
}

// store the first COUNT elements of a vector
template <int COUNT, typename Vector, typename T>
static inline void store_part(const Vector& from, T* to) {
    if constexpr (std::is_same_v<Vector, at::vec::Vectorized<T>> && sizeof(T) < 4) {
#if defined(CPU_CAPABILITY_AVX512)
        if constexpr (COUNT * sizeof(T) == 32)
            return _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), _mm512_castsi512_si256(from));
        if constexpr (COUNT * sizeof(T) == 16)
            return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm512_castsi512_si128(from));
#elif defined(CPU_CAPABILITY_AVX2)
        if constexpr (COUNT * sizeof(T) == 16)
            return _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_castsi256_si128(from));
#endif
    }
    from.store(to, COUNT);
}

// the bits of a vector as a vector of another type
template <typename To, typename From>
static inline at::vec::Vectorized<To> cast_bits(const at::vec::Vectorized<From>& from) {
    static_assert(sizeof(at::vec::Vectorized<To>) == sizeof(from));
    at::vec::Vectorized<To> to;
    std::memcpy(&to, &from, sizeof(to));
    return to;
}
template <typename To, typename From, int N>
static inline at::vec::VectorizedN<To, N> cast_bits(const at::vec::VectorizedN<From, N>& from) {
    at::vec::VectorizedN<To, N> to;
    for (int i = 0; i < N; i++) to[i] = cast_bits<To>(from[i]);
    return to;
}

// the lowest bytes of integers
template <typename Vector>
static inline at::vec::Vectorized<uint8_t> to_bytes(const Vector& from) {
    return at::vec::convert<uint8_t>(from);
}
#if defined(CPU_CAPABILITY_AVX512)
static inline at::vec::Vectorized<uint8_t> to_bytes(const at::vec::Vectorized<int32_t>& from) {
    return _mm512_castsi128_si512(_mm512_cvtepi32_epi8(from));
}
#endif

// the largest of the integers of a vector
static inline int32_t largest_of(const at::vec::Vectorized<int32_t>& from) {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_reduce_max_epi32(from);
#else
    int32_t values[at::vec::Vectorized<int32_t>::size()];
    from.store(values);
    return *std::max_element(std::begin(values), std::end(values));
#endif
}

// the upper halves of numbers, which are the numbers in bfloat16 if the lower halves are zero
static inline at::vec::Vectorized<at::BFloat16> upper_halves(const at::vec::Vectorized<float>& from) {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_castsi256_si512(_mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_castps_si512(from), 16)));
#else
    return at::vec::convert<at::BFloat16>(from);
#endif
}
static inline at::vec::Vectorized<at::BFloat16> upper_halves(const at::vec::VectorizedN<float, 2>& from) {
#if defined(CPU_CAPABILITY_AVX512)
    const at::vec::Vectorized<at::BFloat16> first = upper_halves(from[0]), second = upper_halves(from[1]);
    return _mm512_inserti64x4(first, _mm512_castsi512_si256(second), 1);
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i first = _mm256_srli_epi32(_mm256_castps_si256(from[0]), 16);
    const __m256i second = _mm256_srli_epi32(_mm256_castps_si256(from[1]), 16);
    return _mm256_permute4x64_epi64(_mm256_packus_epi32(first, second), 0xD8);
#else
    return at::vec::convert<at::BFloat16, 1, float, 2>(from);
#endif
}
"""

_COUNT = r"static_cast<int64_t>\((?P<count>\d+)\)"
_LOAD = re.compile(rf"at::vec::Vectorized<(?P<type>at::BFloat16|at::Half|uint8_t)>::loadu\((?P<from>.+?), {_COUNT}\);")
_STORE = re.compile(rf"(?P<value>\w+)\.store\((?P<to>(?!tmpbuf).+?), {_COUNT}\);")
_CAST = re.compile(
    rf"\[&\]\(\)\s*\{{\s*__at_align__ std::array<(?P<from>\w+), (?P<size>\d+)> tmpbuf0;"
    rf"\s*(?P<value>\w+)\.store\(tmpbuf0\.data\(\), {_COUNT}\);"
    r"\s*__at_align__ std::array<(?P<to>\w+), (?P=count)> tmpbuf_out;"
    r"\s*for \(int i = 0; i < static_cast<int64_t>\((?P=count)\); i\+\+\)"
    r"\s*\{\s*tmpbuf_out\[i\] = c10::bit_cast<(?P=to)>\(tmpbuf0\[i\]\);\s*\}"
    r"\s*return\s+at::vec::Vectorized(?:N)?<(?P=to)(?:, \d+)?>"
    r"::loadu\(tmpbuf_out\.data\(\), static_cast<int64_t>\((?P=count)\)\);"
    r"\s*\}\s*\(\)"
)
_INTEGERS = r"at::vec::Vectorized<int32_t>"
_LARGEST = re.compile(
    rf"at::vec::vec_reduce_all<int32_t, 1>\(\[\]\({_INTEGERS}& x, {_INTEGERS}& y\) "
    r"\{ return at::vec::maximum\(x, y\); \}, (?P<value>\w+)\)"
)
_UPPER_HALF = -(1 << 16)
_DEFINITION = re.compile(
    r"auto (?P<name>\w+) =\s*(?:"
    r"static_cast<int32_t>\((?P<number>-?\d+)\);"
    r"|at::vec::Vectorized(?:N)?<int32_t(?:,2)?>\((?P<spread>\w+)\);"
    r"|\w+ & (?P<mask>\w+);"
    r"|cast_bits<float>\((?P<bits>\w+)\)\s*;"
    r"|at::vec::convert<at::BFloat16(?:,1,float,2)?>\((?P<converted>\w+)\);)?"
)
_HELPERS = ("load_part<", "store_part<", "cast_bits<", "to_bytes(", "largest_of(", "upper_halves(")


def uses_helpers(source: str) -> bool:
    """Return True if a source needs HELPERS."""
    return any(name in source for name in _HELPERS)


def improve(source: str) -> str:
    """Return the source of a kernel with the faster forms."""
    source = _CAST.sub(r"cast_bits<\g<to>>(\g<value>)", source)
    source = source.replace("at::vec::convert<uint8_t>(", "to_bytes(")
    source = _LARGEST.sub(r"largest_of(\g<value>)", source)
    source = _without_second_rounding(source)
    source = _LOAD.sub(r"load_part<\g<type>, \g<count>>(\g<from>);", source)
    return _STORE.sub(r"store_part<\g<count>>(\g<value>, \g<to>);", source)


def _without_second_rounding(source: str) -> str:
    """Do not round to bfloat16 again what is rounded: ``storage.round_to`` sets the lower halves of numbers to zero."""
    masks: set[str] = set()  # variables whose bits are those of _UPPER_HALF
    rounded: set[str] = set()  # variables whose lower halves are zero

    def see(definition: re.Match[str]) -> str:
        name, number, spread, mask, bits, converted = definition.group(
            "name", "number", "spread", "mask", "bits", "converted"
        )
        is_mask = number == str(_UPPER_HALF) or spread in masks
        is_rounded = mask in masks or bits in rounded
        for names, holds in ((masks, is_mask), (rounded, is_rounded)):
            (names.add if holds else names.discard)(name)
        return f"auto {name} = upper_halves({converted});" if converted in rounded else definition[0]

    return _DEFINITION.sub(see, source)
