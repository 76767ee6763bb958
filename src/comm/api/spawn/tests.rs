use convoke_env::ExitCause;

use super::*;
use convoke_testkit::fuzz;

#[test]
fn call_ids_round_trip() {
    let call_id =
        SpawnCallId { spawner: 7, token: "abc".to_owned(), call: 2, place: "a folder/x.rs:1:2".to_owned() };
    assert_eq!(call_id.to_string().parse(), Ok(call_id));
    for text in ["", "7", "7 abc", "7 abc 2", "x abc 2 place", "7 abc x place"] {
        assert!(text.parse::<SpawnCallId>().is_err(), "{text}");
    }
}

#[test]
fn damaged_call_ids_are_refused_without_panic() {
    let good = ["7 abc 2 a folder/x.rs:1:2", "4294967295 t 18446744073709551615 p"];
    let read =
        |bytes: &[u8]| std::str::from_utf8(bytes).ok().and_then(|text| text.parse::<SpawnCallId>().ok());
    fuzz("spawn::damaged_call_ids_are_refused_without_panic", &good, 4096, read, |call_id| {
        call_id.to_string().into_bytes()
    });
}

#[test]
fn ranks_are_polled_without_pidfd() {
    let mut spawn = Spawn::new(2);
    spawn.use_pidfds = false;
    spawn.clone().run(|_| ()).unwrap();
    let error = spawn.run(|rank| if rank == 1 { Err("on purpose") } else { Ok(()) }).unwrap_err();
    assert!(matches!(error, SpawnError::Failed { rank: 1, size: 2, how: ExitCause::Code(1), .. }), "{error}");
}

#[test]
fn errors_are_passed_to_ranks_unchanged_and_bounded() {
    let failed = |stderr: &str| SpawnError::Failed {
        rank: 1,
        size: 2,
        how: ExitCause::Signal(9),
        stderr: stderr.to_owned(),
    };
    let errors = [
        failed("words\n"),
        SpawnError::Timeout { ranks: vec![1], after: Duration::from_millis(1) },
        SpawnError::system("do this", std::io::Error::other("no")),
        SpawnError::Unusable("not so".to_owned()),
    ];
    for error in errors {
        let copy: SpawnError = serde_json::from_slice(&serde_json::to_vec(&error).unwrap()).unwrap();
        assert_eq!(copy.to_string(), error.to_string());
    }
    for call in 0..1000 {
        call_results::record_error(call, &Err(failed(&"x".repeat(4 << 10))));
    }
    assert!(call_results::encode_errors().len() < 128 << 10);
}
