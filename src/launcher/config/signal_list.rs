//! Reads lists of signals. Pure.

use nix::sys::signal::Signal;

/// Parses a list of signal names. Leaves out, with a warning, signals that no process can handle or that the
/// launcher needs itself.
pub(super) fn signals(flag: &str, text: &str, warnings: &mut Vec<String>) -> Vec<Signal> {
    use Signal::{SIGCHLD, SIGFPE, SIGILL, SIGKILL, SIGSEGV, SIGSTOP};
    let mut out = Vec::new();
    for name in text.split(',').map(str::trim).filter(|name| !name.is_empty()) {
        match name.parse::<Signal>() {
            Ok(signal @ (SIGCHLD | SIGFPE | SIGILL | SIGKILL | SIGSEGV | SIGSTOP)) => {
                warnings.push(format!("--{flag}: {signal} cannot be handled; it is left out"));
            }
            Ok(signal) if out.contains(&signal) => {}
            Ok(signal) => out.push(signal),
            Err(_) => {
                let full = format!("SIG{}", name.to_uppercase().trim_start_matches("SIG"));
                let advice = full
                    .parse::<Signal>()
                    .map_or(String::new(), |signal| format!("; did you mean {signal}?"));
                warnings.push(format!("--{flag}: no signal is called {name}; it is left out{advice}"));
            }
        }
    }
    out
}
