//! Logging through the `log` crate.
//!
//! If the program has a logger, its logger is used. Otherwise this module installs a logger to stderr if
//! CONVOKE_LOG names a level, such as `info`.

use std::io::{self, Write};
use std::sync::{Once, OnceLock};
use std::time::Instant;

use convoke_env::EnvError;
use log::{LevelFilter, Log, Metadata, Record};

use crate::error::CommError;

/// Environment variable that names the least severe level that is written.
const VARIABLE: &str = "CONVOKE_LOG";

/// Writes the log records of this crate to stderr, one line each: `convoke[PID] 1.234 s info: ...`. The time
/// is counted from the first session of this process.
struct Stderr;

static SINCE: OnceLock<Instant> = OnceLock::new();

/// Installs the logger for stderr if CONVOKE_LOG asks for it and the program has none.
pub(crate) fn install() -> Result<(), CommError> {
    static INSTALLED: Once = Once::new();
    let level = level(std::env::var_os(VARIABLE).map(|value| value.to_string_lossy().into_owned()))?;
    INSTALLED.call_once(|| {
        SINCE.get_or_init(Instant::now);
        if level != LevelFilter::Off && log::set_logger(&Stderr).is_ok() {
            log::set_max_level(level);
        }
    });
    Ok(())
}

fn level(value: Option<String>) -> Result<LevelFilter, EnvError> {
    let Some(value) = value.filter(|value| !value.trim().is_empty()) else { return Ok(LevelFilter::Off) };
    value.trim().parse().map_err(|_| EnvError::Invalid {
        name: VARIABLE,
        value: value.chars().take(64).collect(),
        expected: "off, error, warn, info, debug or trace",
    })
}

impl Log for Stderr {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.target().starts_with("convoke")
    }

    fn log(&self, record: &Record<'_>) {
        if !self.enabled(record.metadata()) {
            return;
        }
        let seconds = SINCE.get().map_or(0.0, |since| since.elapsed().as_secs_f64());
        let level = record.level().as_str().to_ascii_lowercase();
        let line = format!("convoke[{}] {seconds:.3} s {level}: {}\n", std::process::id(), record.args());
        // One write, so that lines of several processes do not mix. If the write fails, there is nowhere to
        // report it.
        let _ = io::stderr().lock().write_all(line.as_bytes());
    }

    fn flush(&self) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn levels_match_the_log_crate() {
        let cases = [
            (None, Some(LevelFilter::Off)),
            (Some(""), Some(LevelFilter::Off)),
            (Some("info"), Some(LevelFilter::Info)),
            (Some(" WARN "), Some(LevelFilter::Warn)),
            (Some("trace"), Some(LevelFilter::Trace)),
            (Some("off"), Some(LevelFilter::Off)),
            (Some("1"), None),
            (Some("verbose"), None),
        ];
        for (value, expected) in cases {
            let read = level(value.map(str::to_owned));
            assert_eq!(read.as_ref().ok().copied(), expected, "{value:?}");
            if let Err(error) = read {
                let value = value.unwrap();
                let wanted = format!("CONVOKE_LOG={value:?} is not off, error, warn, info, debug or trace");
                assert_eq!(error.to_string(), wanted);
            }
        }
    }
}
