-- Run by psql at the server's first start, after the role was made. The variable is the container's; a statement with a
-- password in it is nothing for the log.
SET log_statement = 'none';
SET log_min_duration_statement = -1;
\getenv password ROIR_PASSWORD
ALTER ROLE roir PASSWORD :'password';
