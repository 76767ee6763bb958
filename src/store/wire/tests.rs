//! The decoder against whole, split, pipelined, damaged and random bytes.

use std::time::{SystemTime, UNIX_EPOCH};

use super::decode::Malformed;
use super::{Decoder, Kind, MAX_KEY_BYTES, MAX_KEY_COUNT, MAX_VALUE_BYTES, Request, encode};

/// Returns a handshake and then every kind of request, once or several times.
fn conversation() -> Vec<u8> {
    let mut out = Vec::new();
    encode::handshake(&mut out, 0x4444);
    for kind in [Kind::Set, Kind::Append, Kind::QueuePush] {
        encode::blobs(&mut out, kind, &[b"/key", b"value"]);
        encode::blobs(&mut out, kind, &[b"", b""]);
        encode::blobs(&mut out, kind, &[&[b'k'; MAX_KEY_BYTES], &[b'v'; 3000]]);
    }
    for kind in [Kind::Get, Kind::Delete, Kind::QueuePop, Kind::QueueLen] {
        encode::blobs(&mut out, kind, &[b"/key"]);
    }
    encode::blobs(&mut out, Kind::CompareSet, &[b"/c", b"", b"desired"]);
    for number in [0, -7, i64::MAX, i64::MIN] {
        encode::key_and_number(&mut out, Kind::Add, b"/n", number);
        encode::key_and_number(&mut out, Kind::Barrier, b"/b", number);
    }
    for kind in [Kind::Check, Kind::Wait, Kind::MultiGet] {
        for keys in [vec![], vec![&b"/a"[..]], vec![&b"/a"[..], b"", b"/a", &[0xff; 40]]] {
            encode::counted(&mut out, kind, keys.len(), keys.into_iter());
        }
    }
    encode::counted(&mut out, Kind::MultiSet, 2, [&b"/m1"[..], b"1", b"/m2", b""].into_iter());
    encode::counted(&mut out, Kind::MultiSet, 0, [].into_iter());
    for kind in [Kind::NumKeys, Kind::CancelWait, Kind::ListKeys] {
        encode::bare(&mut out, kind);
    }
    out
}

/// Decodes `stream`, which arrives in pieces that end at `ends`. Returns each request as text.
fn decode(stream: &[u8], ends: impl IntoIterator<Item = usize>) -> Result<Vec<String>, Malformed> {
    let mut decoder = Decoder::default();
    let mut requests = Vec::new();
    let mut start = 0;
    for end in ends {
        while let Some((request, length)) = decoder.next(&stream[start..end])? {
            assert!(length > 0 && start + length <= end);
            requests.push(format!("{request:?}"));
            start += length;
        }
    }
    Ok(requests)
}

/// A random number generator. It prints its seed, and takes it from `CONVOKE_SEED` if that is set.
struct Random(u64);

impl Random {
    fn new() -> Random {
        let clock = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_nanos() as u64;
        let seed = std::env::var("CONVOKE_SEED").map_or_else(|_| clock(), |seed| seed.parse().unwrap());
        println!("replay with CONVOKE_SEED={seed}");
        Random(seed)
    }

    fn below(&mut self, limit: usize) -> usize {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) % limit as u64) as usize
    }

    /// Returns ascending positions up to `length`, with steps of at most `step`.
    fn splits(&mut self, length: usize, step: usize) -> Vec<usize> {
        let mut ends = Vec::new();
        let mut end = 0;
        while end < length {
            end = (end + 1 + self.below(step)).min(length);
            ends.push(end);
        }
        ends
    }
}

#[test]
fn encoded_requests_round_trip() {
    let stream = conversation();
    let requests = decode(&stream, [stream.len()]).unwrap();
    assert_eq!(requests.len(), 2 + 9 + 4 + 1 + 8 + 9 + 2 + 3);
    assert_eq!(requests[..2], ["Validate", "Ping { nonce: 17476 }"]);

    let mut bytes = Vec::new();
    encode::handshake(&mut bytes, 1);
    let hello = bytes.len();
    encode::counted(&mut bytes, Kind::MultiSet, 2, [&b"/m1"[..], b"1", b"/m2", b"22"].into_iter());
    let mut decoder = Decoder::default();
    decoder.next(&bytes).unwrap().unwrap();
    decoder.next(&bytes[5..]).unwrap().unwrap();
    let (request, length) = decoder.next(&bytes[hello..]).unwrap().unwrap();
    let Request::MultiSet { pairs } = request else { panic!("{request:?}") };
    assert_eq!(pairs.collect::<Vec<_>>(), [&b"/m1"[..], b"1", b"/m2", b"22"]);
    assert_eq!(hello + length, bytes.len());
}

#[test]
fn decoding_byte_by_byte_equals_decoding_at_once() {
    let stream = conversation();
    assert_eq!(decode(&stream, 1..=stream.len()), decode(&stream, [stream.len()]));
}

#[test]
fn decoding_random_splits_equals_decoding_at_once() {
    let mut random = Random::new();
    let stream = conversation();
    let whole = decode(&stream, [stream.len()]);
    for step in [2, 3, 7, 40, 300, 5000] {
        for _ in 0..30 {
            let ends = random.splits(stream.len(), step);
            assert_eq!(decode(&stream, ends), whole);
        }
    }
}

#[test]
fn random_damage_neither_panics_nor_depends_on_splits() {
    let mut random = Random::new();
    let stream = conversation();
    for _ in 0..3000 {
        let mut damaged = stream.clone();
        for _ in 0..=random.below(4) {
            let at = random.below(damaged.len());
            match random.below(4) {
                0 => damaged[at] = random.below(256) as u8,
                1 => damaged[at] ^= 1 << random.below(8),
                2 => drop(damaged.drain(at..(at + 1 + random.below(20)).min(damaged.len()))),
                _ => drop(damaged.splice(at..at, (0..random.below(12)).map(|i| i as u8).collect::<Vec<_>>())),
            }
        }
        let ends = random.splits(damaged.len(), 4000);
        assert_eq!(decode(&damaged, ends), decode(&damaged, [damaged.len()]));
    }
}

#[test]
fn random_bytes_never_panic() {
    let mut random = Random::new();
    for _ in 0..3000 {
        let mut bytes = Vec::new();
        encode::handshake(&mut bytes, 7);
        for _ in 0..random.below(200) {
            // Most bytes are small numbers, so that types and lengths are often plausible.
            bytes.push(if random.below(3) == 0 { random.below(256) } else { random.below(20) } as u8);
        }
        let ends = random.splits(bytes.len(), 50);
        let _ = decode(&bytes, ends);
    }
}

#[test]
fn size_limits_depend_only_on_the_announced_length() {
    let over = |kind: Kind, fields: &[&[u8]]| {
        let mut bytes = Vec::new();
        encode::handshake(&mut bytes, 1);
        bytes.push(kind as u8);
        fields.iter().for_each(|field| bytes.extend_from_slice(field));
        decode(&bytes, [bytes.len()]).map(|requests| requests.len())
    };
    let word = |length: usize| (length as u64).to_le_bytes();
    let key = [&word(1)[..], b"k"].concat();
    assert_eq!(over(Kind::Get, &[&word(MAX_KEY_BYTES)]), Ok(2));
    assert_eq!(over(Kind::Get, &[&word(MAX_KEY_BYTES + 1)]), Err(Malformed::Key(8193)));
    assert_eq!(over(Kind::Get, &[&[0xff; 8]]), Err(Malformed::Key(u64::MAX)));
    assert_eq!(over(Kind::Set, &[&key, &word(MAX_VALUE_BYTES)]), Ok(2));
    assert_eq!(over(Kind::Set, &[&key, &word(MAX_VALUE_BYTES + 1)]), Err(Malformed::Value(8_388_609)));
    assert_eq!(over(Kind::CompareSet, &[&key, &key, &[0xff; 8]]), Err(Malformed::Value(u64::MAX)));
    assert_eq!(over(Kind::Wait, &[&word(MAX_KEY_COUNT)]), Ok(2));
    for kind in [Kind::Check, Kind::Wait, Kind::MultiGet, Kind::MultiSet] {
        assert_eq!(over(kind, &[&word(MAX_KEY_COUNT + 1)]), Err(Malformed::Count(131_073)));
        assert_eq!(over(kind, &[&[0xff; 8]]), Err(Malformed::Count(u64::MAX)));
        assert!(over(kind, &[&word(2), &key, &[0xff; 8]]).is_err());
    }
}

#[test]
fn total_request_size_is_limited() {
    let mut bytes = Vec::new();
    encode::handshake(&mut bytes, 1);
    let hello = bytes.len();
    let value = vec![b'v'; MAX_VALUE_BYTES];
    encode::counted(&mut bytes, Kind::MultiSet, MAX_KEY_COUNT, (0..32).flat_map(|_| [&b"k"[..], &value]));
    assert!(bytes.len() - hello > super::MAX_REQUEST_BYTES);
    assert_eq!(decode(&bytes, [bytes.len()]), Err(Malformed::Request));
}

#[test]
fn first_and_only_first_request_is_a_valid_handshake() {
    let first = |bytes: &[u8]| decode(bytes, [bytes.len()]);
    for byte in 1..=255 {
        assert_eq!(first(&[byte]), Err(Malformed::NotValidated(byte)));
    }
    assert_eq!(first(b"\x00GET "), Err(Malformed::Magic(u32::from_le_bytes(*b"GET "))));
    assert_eq!(first(&[0, 0xce, 0xf7, 0x85]), Ok(vec![]), "unfinished");
    assert_eq!(first(&[0, 0xce, 0xf7, 0x85, 0x3c, 0]), Err(Malformed::ValidatedTwice));
    for kind in (19..=255).filter(|&kind| kind != Kind::SetLastWill as u8) {
        assert_eq!(first(&[0, 0xce, 0xf7, 0x85, 0x3c, kind]), Err(Malformed::Type(kind)));
    }
}

#[test]
fn request_in_many_pieces_is_scanned_once() {
    let mut bytes = Vec::new();
    encode::handshake(&mut bytes, 1);
    encode::counted(&mut bytes, Kind::Wait, 60_000, (0..60_000).map(|_| &b"/some-key"[..]));
    let started = std::time::Instant::now();
    // Scanning the request again for each piece would take minutes.
    assert_eq!(decode(&bytes, 1..=bytes.len()).unwrap().len(), 3);
    assert!(started.elapsed().as_secs() < 10, "{:?}", started.elapsed());
}

proptest::proptest! {
    #[test]
    fn requests_survive_any_split(
        sets in proptest::collection::vec((proptest::collection::vec(0..=255_u8, 0..20),
                                           proptest::collection::vec(0..=255_u8, 0..200)), 1..20),
        step in 1..100_usize,
    ) {
        let mut bytes = Vec::new();
        encode::handshake(&mut bytes, 9);
        for (key, value) in &sets {
            encode::blobs(&mut bytes, Kind::Set, &[key, value]);
        }
        let ends = (1..=bytes.len()).filter(|end| end % step == 0 || *end == bytes.len());
        let decoded = decode(&bytes, ends).unwrap();
        let expected: Vec<_> =
            sets.iter().map(|(key, value)| format!("{:?}", Request::Set { key, value })).collect();
        proptest::prop_assert_eq!(&decoded[2..], &expected[..]);
    }
}
