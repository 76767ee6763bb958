//! The environment of ranks that a program starts on this host by itself, without a launcher.

use std::env;
use std::io;
use std::net::Ipv4Addr;

use crate::generation::Generation;
use crate::vars;
use crate::worker_env::{Role, WorkerEnv};

/// Variables of a launcher that describe the program itself, and would be false for its ranks.
const REMOVED: [&str; 5] =
    [vars::RUN_ID, vars::RESTART_COUNT, vars::MAX_RESTARTS, vars::ERROR_FILE, vars::AGENT_FD];

/// Ranks that meet at a store that their parent serves on loopback.
#[derive(Debug)]
pub struct LocalWorld {
    size: usize,
    port: u16,
    generation: Generation,
    token: String,
}

impl LocalWorld {
    /// Describes `size` ranks; the store listens at `port`.
    ///
    /// # Errors
    /// The error of the system if it gives no random numbers.
    pub fn new(size: usize, port: u16) -> io::Result<Self> {
        let random = || Generation::random().map_err(io::Error::other);
        Ok(Self { size, port, generation: random()?, token: format!("{}{}", random()?, random()?) })
    }

    /// Returns the variables of a rank, in which it differs from this process; `None` removes a variable. The
    /// ranks get a secret token, unless this process has one, which they inherit.
    #[must_use]
    pub fn variables(&self, rank: usize) -> Vec<(&'static str, Option<String>)> {
        let worker = WorkerEnv {
            rank,
            world_size: self.size,
            local_rank: rank,
            local_world_size: self.size,
            group_rank: 0,
            group_world_size: 1,
            role: Role { name: "default".to_owned(), rank, world_size: self.size },
            master_addr: Ipv4Addr::LOCALHOST.to_string(),
            master_port: self.port,
            restart_count: 0,
            max_restarts: 0,
            run_id: String::new(),
            use_agent_store: true,
            error_file: None,
            generation: Some(self.generation),
        };
        let set = worker.to_vars().into_iter().filter(|(name, _)| !REMOVED.contains(name));
        let has_token = [vars::TOKEN, vars::TOKEN_FILE].iter().any(|name| env::var_os(name).is_some());
        let token = (!has_token).then(|| (vars::TOKEN, self.token.clone()));
        let removed = REMOVED.iter().map(|&name| (name, None));
        removed.chain(set.chain(token).map(|(name, value)| (name, Some(value)))).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rank_of_a_local_world_is_read_as_it_was_described() {
        let world = LocalWorld::new(3, 1234).unwrap();
        let variables = world.variables(2);
        let get = |name: &str| variables.iter().find(|(other, _)| *other == name)?.1.clone();
        let read = WorkerEnv::from_vars(get).unwrap().unwrap();
        assert_eq!((read.rank, read.world_size, read.local_rank), (2, 3, 2));
        assert_eq!(
            (read.master_addr.as_str(), read.master_port, read.use_agent_store),
            ("127.0.0.1", 1234, true)
        );
        assert_eq!(read.generation, Some(world.generation));
        assert!(variables.contains(&(vars::AGENT_FD, None)), "the channel to the launcher is not inherited");
    }
}
