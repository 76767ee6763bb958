//! Gives the job's token to its other nodes through MUNGE, which authenticates users between the hosts of a
//! cluster. Slurm's clusters have it.

use std::time::Duration;

use convoke_env::Token;
use nix::unistd::geteuid;

use crate::formatting::hex;
use crate::helper_program::output;

/// Key in the job's part of the store. Its value is the token as a MUNGE credential, which only processes of
/// this user can decode.
pub(super) const TOKEN_KEY: &[u8] = b"convoke/token";
const TIMEOUT: Duration = Duration::from_secs(5);
/// Statuses of `unmunge` for a credential that is genuine: valid, expired, encoded by a clock that is ahead,
/// or decoded on this host before.
const GENUINE: [&str; 4] = ["0", "15", "16", "17"];

/// Returns the token as a credential. `None` if this host has no MUNGE, or it does not answer.
pub(super) fn encode(token: &Token) -> Option<String> {
    let user = geteuid().to_string();
    let hex = hex(token.as_bytes());
    let text = output("munge", &["--restrict-uid", &user], hex.as_bytes(), TIMEOUT).ok()?;
    let credential = text.trim();
    credential.starts_with("MUNGE:").then(|| credential.to_owned())
}

/// Returns the token in a credential that a process of this user has encoded.
///
/// # Errors
/// The reason why there is none, as a line.
pub(super) fn decode(credential: &str) -> Result<Token, String> {
    let arguments = ["--numeric", "--keys=STATUS,UID"];
    let text = output("unmunge", &arguments, credential.as_bytes(), TIMEOUT)?;
    read(&text, geteuid().as_raw())
}

/// Reads the output of `unmunge`: lines of metadata, an empty line, the token as hexadecimal digits.
fn read(text: &str, user: u32) -> Result<Token, String> {
    let (metadata, payload) = text.split_once("\n\n").ok_or("MUNGE refuses it for this user")?;
    let value = |key: &str| {
        let line = metadata.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.map(str::trim).unwrap_or("missing")
    };
    if !GENUINE.contains(&value("STATUS")) {
        return Err(format!("MUNGE refuses it with status {}", value("STATUS")));
    }
    if value("UID") != user.to_string() {
        return Err(format!("user {} encoded it, not {user}", value("UID")));
    }
    let digits: Vec<u8> = payload.trim().bytes().collect();
    let byte = |pair: &[u8]| u8::from_str_radix(std::str::from_utf8(pair).ok()?, 16).ok();
    let bytes: Option<Vec<u8>> = digits.chunks(2).map(byte).collect();
    match bytes.filter(|bytes| !bytes.is_empty()) {
        Some(bytes) => Ok(Token::new(bytes)),
        None => Err("it contains no token".to_owned()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn token_is_accepted_from_this_user_alone() {
        let token = |text: &str| read(text, 1000).map(|token| token.as_bytes().to_vec());
        assert_eq!(token("STATUS:          0\nUID:             1000\n\n0aff"), Ok(vec![10, 255]));
        assert_eq!(token("STATUS:          17\nUID:             1000\n\n0aff"), Ok(vec![10, 255]));
        for (text, why) in [
            ("", "MUNGE refuses it for this user"),
            ("STATUS:          14\nUID:             1000\n\n0aff", "MUNGE refuses it with status 14"),
            ("STATUS:          0\nUID:             1001\n\n0aff", "user 1001 encoded it, not 1000"),
            ("STATUS:          0\nUID:             1000\n\nxyz", "it contains no token"),
            ("STATUS:          0\nUID:             1000\n\n", "it contains no token"),
        ] {
            assert_eq!(token(text), Err(why.to_owned()), "{text:?}");
        }
    }
}
