//! `test-worker failing HOW`: if RANK equals FAILING_RANK, fails as Rust programs do. Otherwise sleeps until
//! it is stopped.

#![allow(clippy::print_stdout)] // no test reads this output

use std::error::Error;
use std::time::Duration;

pub(super) fn run(arguments: &[&str]) -> Result<(), Box<dyn Error>> {
    if std::env::var("RANK") != std::env::var("FAILING_RANK") {
        std::thread::sleep(Duration::from_secs(1000));
    }
    match arguments.first().copied() {
        Some("panic") => panics(&[1, 2, 3], 7),
        Some("thread") => {
            let thread = std::thread::Builder::new().name("loader".to_owned()).spawn(|| panics(&[], 1))?;
            thread.join().map_err(|_| "the loader is gone")?
        }
        Some("overflow") => {
            println!("{}", overflow(1));
            Ok(())
        }
        Some("error") => Err("the data set is empty".into()),
        other => Err(format!("how? {other:?}")),
    }?;
    Ok(())
}

fn panics(list: &[i32], at: usize) -> Result<(), String> {
    println!("{}", list[at]);
    Ok(())
}

#[allow(unconditional_recursion)] // the recursion must overflow the stack
fn overflow(depth: u64) -> u64 {
    let room = std::hint::black_box([depth; 512]);
    overflow(depth + 1) + room[usize::try_from(depth % 512).unwrap_or(0)]
}
