//! Tests of each operation: its result, the clients that it wakes, and that no wait is left behind.

use super::waits::MAX_WAITS_PER_CLIENT;
use super::{ClientId, Refusal, State, Woken, leading_number};
use crate::answer::answer;
use crate::wire::{Decoder, Kind, encode};

const ANN: ClientId = ClientId(1);
const BOB: ClientId = ClientId(2);
const CLEO: ClientId = ClientId(3);

fn wait(state: &mut State, client: ClientId, keys: &[&[u8]]) -> bool {
    state.wait(client, keys.iter().copied()).unwrap()
}

fn woken_by(work: impl FnOnce(&mut Woken)) -> Vec<ClientId> {
    let mut woken = Vec::new();
    work(&mut woken);
    woken
}

#[test]
fn wait_for_several_keys_ends_with_the_last() {
    let mut state = State::default();
    state.set(b"here", b"", &mut vec![]);
    assert!(!wait(&mut state, ANN, &[b"a", b"here", b"b", b"a"]));
    assert_eq!(woken_by(|woken| state.set(b"a", b"", woken)), []);
    assert!(state.delete(b"a"), "keys already seen are not awaited again");
    assert!(state.delete(b"here"));
    assert_eq!(woken_by(|woken| state.set(b"b", b"", woken)), [ANN]);
    assert!(state.waits_are_empty());
}

#[test]
fn waiters_are_woken_in_arrival_order() {
    let mut state = State::default();
    for client in [BOB, ANN, CLEO] {
        wait(&mut state, client, &[b"k"]);
    }
    assert_eq!(woken_by(|woken| assert!(state.add(b"k", 1, woken).is_ok())), [BOB, ANN, CLEO]);
    assert_eq!(woken_by(|woken| state.set(b"k", b"", woken)), []);
    assert!(state.waits_are_empty());
}

#[test]
fn several_waits_of_one_client_are_each_answered() {
    let mut state = State::default();
    wait(&mut state, ANN, &[b"a"]);
    wait(&mut state, ANN, &[b"b"]);
    wait(&mut state, ANN, &[b"b"]);
    assert_eq!(woken_by(|woken| state.set(b"b", b"", woken)), [ANN, ANN]);
    assert_eq!(woken_by(|woken| state.set(b"a", b"", woken)), [ANN]);
    assert!(state.waits_are_empty());
}

#[test]
fn a_failed_compare_set_wakes_nobody() {
    let mut state = State::default();
    wait(&mut state, ANN, &[b"k"]);
    assert_eq!(woken_by(|woken| drop(state.compare_set(b"k", b"x", b"y", woken).to_vec())), []);
    assert_eq!(woken_by(|woken| drop(state.compare_set(b"k", b"", b"y", woken).to_vec())), [ANN]);
}

#[test]
fn cancelled_waits_are_forgotten() {
    let mut state = State::default();
    for i in 0..1000_u64 {
        wait(&mut state, ClientId(i), &[b"k", format!("own-{i}").as_bytes()]);
    }
    assert!(!state.barrier(ANN, b"b", 2, &mut vec![]).unwrap());
    for i in 0..1000_u64 {
        assert_eq!(woken_by(|woken| state.cancel(ClientId(i), woken)), []);
    }
    assert!(state.waits_are_empty());
    assert_eq!(woken_by(|woken| state.set(b"k", b"", woken)), []);
    assert_eq!(state.get(b"b"), Some(&b"1"[..]), "who gave up still counts");
}

#[test]
fn waits_per_client_are_limited_and_other_clients_unaffected() {
    let mut state = State::default();
    for i in 0..MAX_WAITS_PER_CLIENT {
        wait(&mut state, ANN, &[i.to_string().as_bytes()]);
    }
    assert_eq!(state.wait(ANN, [&b"one more"[..]].into_iter()), Err(Refusal::TooManyWaits));
    let (keys_a, keys_b): (Vec<_>, Vec<_>) =
        (0..140_000_u32).map(|i| (i.to_le_bytes(), i.to_be_bytes())).unzip();
    assert_eq!(state.wait(BOB, keys_a[..131_072].iter().map(|key| &key[..])), Ok(false));
    assert_eq!(state.wait(BOB, keys_b.iter().map(|key| &key[..])), Err(Refusal::TooManyWaits));
    wait(&mut state, CLEO, &[b"one more"]);
    assert_eq!(woken_by(|woken| state.set(b"one more", b"", woken)), [CLEO]);
    state.cancel(ANN, &mut vec![]);
    state.cancel(BOB, &mut vec![]);
    assert!(state.waits_are_empty());
}

#[test]
fn one_waiter_is_woken_for_each_queue_item() {
    let mut state = State::default();
    for client in [ANN, BOB, CLEO] {
        wait(&mut state, client, &[b"q"]);
    }
    assert_eq!(woken_by(|woken| state.queue_push(b"q", b"1", woken)), [ANN]);
    assert_eq!(woken_by(|woken| state.queue_push(b"q", b"2", woken)), [BOB]);
    assert_eq!(state.queue_pop(ANN, b"q"), (2, Some(b"1"[..].into())));
    assert_eq!(state.queue_pop(BOB, b"q"), (1, Some(b"2"[..].into())));
    assert_eq!(state.queue_pop(BOB, b"q"), (0, None));
    assert_eq!(woken_by(|woken| state.set(b"q", b"a key of that name", woken)), [CLEO]);
    assert!(state.waits_are_empty());
}

#[test]
fn item_of_a_cancelled_waiter_is_offered_to_the_next() {
    let mut state = State::default();
    for client in [ANN, BOB] {
        wait(&mut state, client, &[b"q"]);
    }
    assert_eq!(woken_by(|woken| state.queue_push(b"q", b"1", woken)), [ANN]);
    assert_eq!(woken_by(|woken| state.cancel(ANN, woken)), [BOB]);
    assert_eq!(state.queue_pop(CLEO, b"q").0, 1, "faster than who was woken");
    assert_eq!(woken_by(|woken| state.cancel(BOB, woken)), []);
    assert!(state.waits_are_empty());
}

#[test]
fn item_wakes_the_first_waiter_without_other_missing_keys() {
    let mut state = State::default();
    wait(&mut state, ANN, &[b"q", b"more"]);
    wait(&mut state, BOB, &[b"q"]);
    assert_eq!(woken_by(|woken| state.queue_push(b"q", b"1", woken)), [BOB]);
    assert_eq!(woken_by(|woken| state.set(b"more", b"", woken)), [ANN]);
}

#[test]
fn queues_and_keys_are_separate() {
    let mut state = State::default();
    state.queue_push(b"q", b"1", &mut vec![]);
    assert!(state.has(b"q"));
    assert_eq!((state.num_keys(), state.get(b"q"), state.keys().count()), (0, None, 0));
    assert!(!state.delete(b"q"));
    assert_eq!(state.queue_len(b"q"), 1);
}

#[test]
fn barrier_wakes_its_waiters_and_waiters_of_its_key() {
    let mut state = State::default();
    wait(&mut state, CLEO, &[b"b"]);
    let mut woken = vec![];
    assert_eq!(state.barrier(ANN, b"b", 3, &mut woken), Ok(false));
    assert_eq!(woken, [CLEO]);
    woken.clear();
    assert_eq!(state.barrier(BOB, b"b", 3, &mut woken), Ok(false));
    assert_eq!(state.barrier(CLEO, b"b", 3, &mut woken), Ok(true));
    assert_eq!(woken, [ANN, BOB]);
    assert_eq!(state.barrier(CLEO, b"b", 3, &mut woken), Ok(true), "open from now on");
    state.set(b"text", b"abc", &mut woken);
    assert_eq!(state.barrier(CLEO, b"text", 3, &mut woken), Err(Refusal::NotANumber));
    assert!(state.waits_are_empty());
}

#[test]
fn retain_deletes_keys_without_a_listed_prefix() {
    let mut state = State::default();
    for key in [&b"init/"[..], b"/keep/a", b"/keep", b"/drop", b""] {
        state.set(key, b"", &mut vec![]);
    }
    state.queue_push(b"/queue", b"", &mut vec![]);
    wait(&mut state, ANN, &[b"/late"]);
    assert_eq!(state.retain(&[b"/keep/", b"init/"]), 4);
    let mut left: Vec<_> = state.keys().collect();
    left.sort();
    assert_eq!(left, [&b"/keep/a"[..], b"init/"]);
    assert_eq!(state.queue_len(b"/queue"), 0);
    assert_eq!(woken_by(|woken| state.set(b"/late", b"", woken)), [ANN]);
    assert_eq!(state.retain(&[b""]), 0);
}

#[test]
fn numbers_are_parsed_like_strtoll() {
    let read = [
        ("12", 12),
        ("-3x", -3),
        (" \t\n+7 8", 7),
        ("0x10", 0),
        ("9223372036854775807", i64::MAX),
        ("-9223372036854775808", i64::MIN),
    ];
    for (text, number) in read {
        assert_eq!(leading_number(text.as_bytes()), Some(number), "{text:?}");
    }
    for text in ["", "abc", "-", "+-1", " ", "9223372036854775808", "- 1"] {
        assert_eq!(leading_number(text.as_bytes()), None, "{text:?}");
    }
}

#[test]
fn large_value_is_freed_after_use() {
    let mut state = State::default();
    state.set(b"k", &vec![0; 1 << 20], &mut vec![]);
    state.set(b"k", b"small", &mut vec![]);
    assert!(state.values.get(&b"k"[..]).unwrap().capacity() < 8192);
}

/// Answers the bytes of a client and returns the bytes of the replies.
fn answer_stream(state: &mut State, client: ClientId, bytes: &[u8]) -> Vec<u8> {
    let mut stream = Vec::new();
    encode::handshake(&mut stream, 0);
    let mut decoder = Decoder::default();
    let mut at = 0;
    stream.extend_from_slice(bytes);
    let (mut out, mut woken) = (Vec::new(), Vec::new());
    while let Some((request, length)) = decoder.next(&stream[at..]).unwrap() {
        answer(state, client, request, &mut out, &mut woken).unwrap();
        at += length;
    }
    assert!(woken.is_empty(), "{woken:?}");
    out.split_off(4)
}

#[test]
fn wake_up_and_replies_of_one_client_keep_order() {
    let mut bytes = Vec::new();
    encode::counted(&mut bytes, Kind::Wait, 1, [&b"k"[..]].into_iter());
    encode::key_and_number(&mut bytes, Kind::Add, b"n", 5);
    encode::blobs(&mut bytes, Kind::Set, &[b"k", b"v"]);
    encode::key_and_number(&mut bytes, Kind::Add, b"n", 1);
    let mut expected = 5_i64.to_le_bytes().to_vec();
    expected.push(0);
    expected.extend_from_slice(&6_i64.to_le_bytes());
    assert_eq!(answer_stream(&mut State::default(), ANN, &bytes), expected);
}

/// Requests of torch's client and the replies of its server, as captured from the network.
#[test]
fn captured_traffic_is_answered_byte_for_byte() {
    let captured = [
        // set, then wait and get
        ("01 02000000 00000000 2f6b 02000000 00000000 7631", ""),
        ("06 01000000 00000000 02000000 00000000 2f6b", "00"),
        ("03 02000000 00000000 2f6b", "02000000 00000000 7631"),
        // add 5, add -7
        ("04 02000000 00000000 2f6e 05000000 00000000", "05000000 00000000"),
        ("04 02000000 00000000 2f6e f9ffffff ffffffff", "feffffff ffffffff"),
        // check k and zz
        ("05 02000000 00000000 02000000 00000000 2f6b 03000000 00000000 2f7a7a", "01"),
        // compare_set of an absent key, nothing expected; then of another, "A" expected
        ("02 02000000 00000000 2f63 00000000 00000000 01000000 00000000 41", "01000000 00000000 41"),
        (
            "02 06000000 00000000 2f636d697373 01000000 00000000 41 01000000 00000000 43",
            "01000000 00000000 41",
        ),
        ("07", "03000000 00000000"),
        ("08 02000000 00000000 2f6b", "01000000 00000000"),
        ("09 02000000 00000000 2f61 02000000 00000000 797a", ""),
        (
            "0b 02000000 00000000 03000000 00000000 2f6d31 01000000 00000000 31
                03000000 00000000 2f6d32 02000000 00000000 3232",
            "",
        ),
        (
            "0a 02000000 00000000 03000000 00000000 2f6d31 03000000 00000000 2f6d32",
            "01000000 00000000 31 02000000 00000000 3232",
        ),
        // a wait that is cancelled
        ("06 01000000 00000000 05000000 00000000 2f6e6f7065", ""),
        ("0c", "01"),
        // queues: push, length, wait and pop, pop when empty
        ("0e 02000000 00000000 2f71 05000000 00000000 6974656d31", ""),
        ("10 02000000 00000000 2f71", "01000000 00000000"),
        ("06 01000000 00000000 02000000 00000000 2f71", "00"),
        ("0f 02000000 00000000 2f71", "01000000 00000000 05000000 00000000 6974656d31"),
        ("0f 02000000 00000000 2f71", "00000000 00000000"),
        // a barrier of one; a barrier of two, cancelled
        ("12 02000000 00000000 2f62 01000000 00000000", "00"),
        ("12 03000000 00000000 2f6232 02000000 00000000", ""),
        ("0c", "01"),
        // a client with a world size
        ("04 05000000 00000000 696e69742f 01000000 00000000", "01000000 00000000"),
        ("0d 44440000", "44440000"),
    ];
    let mut state = State::default();
    for (request, reply) in captured {
        assert_eq!(answer_stream(&mut state, ANN, &bytes(request)), bytes(reply), "request {request}");
    }
    let mut state = State::default();
    state.set(b"/k2", b"", &mut vec![]);
    assert_eq!(answer_stream(&mut state, ANN, &[0x11]), bytes("01000000 00000000 03000000 00000000 2f6b32"));
}

/// Converts hexadecimal text to bytes; blanks are ignored.
fn bytes(text: &str) -> Vec<u8> {
    let digits: Vec<char> = text.chars().filter(|digit| !digit.is_whitespace()).collect();
    digits.chunks(2).map(|pair| u8::from_str_radix(&pair.iter().collect::<String>(), 16).unwrap()).collect()
}
